"""A method's figures and its baseline's are resampled together, batch by batch."""

import numpy as np
import pytest
from helpers.comparisons import noisy_document

from inference.benchmark.diff.side import Side
from inference.benchmark.document import ComparisonDocument

METHOD = ("drafter=mine", 0.0)


def _side(document: ComparisonDocument) -> Side:
    return Side(document.figures(*METHOD), document.figures("autoregressive", 0.0))


def test_the_first_value_of_each_figure_is_the_measured_one() -> None:
    document = noisy_document(seed=0)
    for metric, values in _side(document).resampled(stream=0).items():
        assert values[0] == pytest.approx(getattr(document.figures(*METHOD), metric))
        assert values[1:].min() < values[0] < values[1:].max()


def test_prompts_that_were_decoded_together_are_one_unit() -> None:
    alone = _side(noisy_document(seed=0, prompts=4)).units()
    assert all(unit == prompt for prompt, unit in alone.items())
    paired = _side(noisy_document(seed=0, prompts=4, batch=2)).units()
    assert len(paired) == 4
    assert len(set(paired.values())) == 2
    assert all(prompt in unit.split() for prompt, unit in paired.items())


def test_sides_of_one_stream_share_their_resamples() -> None:
    before = _side(noisy_document(seed=0))
    after = _side(noisy_document(seed=0, slowness={"drafter=mine": 2.0}))
    first, same, other = before.resampled(0), after.resampled(0), after.resampled(1)
    for metric, ratio in {"tau": 1.0, "speedup": 0.5, "tokens_per_second": 0.5}.items():
        np.testing.assert_allclose(same[metric] / first[metric], ratio)
        assert np.std(other[metric] / first[metric]) > 1e-3


def test_the_speed_up_is_resampled_with_the_baseline_of_the_same_prompts() -> None:
    """Hard prompts slow down both the method and its baseline, so the speed-up varies less."""
    values = _side(noisy_document(seed=0, prompts=160, batch=2)).resampled(stream=0)
    spread = {metric: float(np.std(own[1:]) / own[0]) for metric, own in values.items()}
    assert spread["speedup"] < spread["tokens_per_second"] / 3


def test_a_baseline_and_a_method_without_one_have_no_speed_up() -> None:
    figures = noisy_document(seed=0).figures(*METHOD)
    for baseline in (figures, None):
        assert list(Side(figures, baseline).resampled(0)) == ["tau", "tokens_per_second"]
