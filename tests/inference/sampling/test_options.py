"""Two requests can be processed together if their sampling options have equal descriptions."""

from typing import Any

import pytest
import torch
from helpers.quick import mostly_slow
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    EpsilonLogitsWarper,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from inference.sampling.options import PREFIX_FREE, Sampling, filter_nucleus

VOCAB = 3000
NO_PREFIX = torch.empty(64, 0, dtype=torch.long)


def _sampling(*processors: object, do_sample: bool = True, seed: int = 0) -> Sampling:
    return Sampling(LogitsProcessorList(processors), do_sample, seed)


def test_equal_settings_have_equal_descriptions() -> None:
    one = _sampling(TemperatureLogitsWarper(0.7), EpsilonLogitsWarper(3e-4), seed=1)
    other = _sampling(TemperatureLogitsWarper(0.7), EpsilonLogitsWarper(3e-4), seed=2)
    assert one.description == other.description


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (_sampling(TopPLogitsWarper(0.9)), _sampling(TopPLogitsWarper(0.9000001))),
        (_sampling(EpsilonLogitsWarper(3.0e-4)), _sampling(EpsilonLogitsWarper(3.00001e-4))),
        (_sampling(TopKLogitsWarper(5)), _sampling(TopKLogitsWarper(5), TopPLogitsWarper(0.9))),
        (_sampling(), _sampling(do_sample=False)),
        (_sampling(), _sampling(RepetitionPenaltyLogitsProcessor(1.2))),
    ],
    ids=["top_p", "epsilon", "one more", "greedy", "reads the prefix"],
)
def test_settings_that_differ_in_the_least_have_other_descriptions(
    one: Sampling, other: Sampling
) -> None:
    assert one.description != other.description


def scores(scale: float, spacing: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    sampled = scale * torch.randn(64, VOCAB, generator=generator)
    return sampled if spacing == 0 else (sampled / spacing).round() * spacing


@pytest.mark.parametrize("top_p", [0.0, 0.5, 0.99, 1.0])
@pytest.mark.parametrize(
    ("scale", "spacing", "fewest"),
    [(0.1, 0.0, 1), (2.0, 0.125, 7), (6.0, 0.0, 400), (6.0, 0.125, 1)],  # bf16 spacing causes ties
)
def test_scores_equal_those_of_transformers(
    top_p: float, scale: float, spacing: float, fewest: int
) -> None:
    warper = TopPLogitsWarper(top_p, min_tokens_to_keep=fewest)
    sampled = scores(scale, spacing)
    assert torch.equal(filter_nucleus(warper, sampled), warper(NO_PREFIX, sampled))


def test_scores_after_a_filter_equal_those_of_transformers() -> None:
    sampled = scores(2.0)
    cut = sampled.masked_fill(sampled < sampled.topk(50).values[:, -1:], -torch.inf)
    warper = TopPLogitsWarper(0.9)
    assert torch.equal(filter_nucleus(warper, cut), warper(NO_PREFIX, cut))


@pytest.mark.parametrize(
    "top_p",
    mostly_slow([0.7292417, 0.7292307, 0.7292305, 0.72925, 0.9], quick=[0.7292307, 0.9]),
)
def test_widely_spread_scores_are_filtered_as_in_transformers(top_p: float) -> None:
    warper = TopPLogitsWarper(top_p)
    near = torch.full((64, VOCAB), 100.0)
    near[:, 17], near[:, 5] = 600.0, 599.0093
    assert torch.equal(filter_nucleus(warper, near), warper(NO_PREFIX, near))
    many = (8 * scores(3.0, 0.125)).repeat(1, 20)
    assert torch.equal(filter_nucleus(warper, many), warper(NO_PREFIX, many))


SETTINGS: dict[str, dict[str, Any]] = {
    "EpsilonLogitsWarper": {"epsilon": 0.01},
    "MinPLogitsWarper": {"min_p": 0.1},
    "TemperatureLogitsWarper": {"temperature": 0.5},
    "TopKLogitsWarper": {"top_k": 3},
    "TopPLogitsWarper": {"top_p": 0.9},
}


@pytest.mark.parametrize("kind", sorted(PREFIX_FREE, key=lambda own: own.__name__))
def test_processors_that_ignore_the_prefix_never_wait_for_the_device(kind: type) -> None:
    warper = kind(**SETTINGS.get(kind.__name__, {}))
    sampling = Sampling(LogitsProcessorList([warper]), do_sample=True)
    logits = torch.randn(4, 9)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert sampling.processed_probs(logits).shape == (4, 9)
