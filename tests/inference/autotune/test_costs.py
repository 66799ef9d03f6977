"""Costs of trees of any size follow from measured ones, which are those of one drafter."""

from pathlib import Path

import pytest
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.variants import VARIANTS

from inference.autotune.costs import LONG_CONTEXT, Costs, known_costs, measure_costs, timed_passes
from inference.autotune.measurement import CONTEXT
from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter

BASE = tiny_settings(combine="sum", parallel_levels=0)
OTHERS = {
    "tail-1": {"tail_layers": 1},
    "tail-2": {"tail_layers": 2},
    "draft-vocabulary": {"draft_vocab_size": 23},
    "feedback": {"trunk": BASE.trunk.model_copy(update={"kind": "feedback"})},
    "hybrid": {"trunk": BASE.trunk.model_copy(update={"kind": "hybrid"})},
}


def test_verification_is_interpolated_and_larger_trees_cost_more() -> None:
    costs = Costs(verify={0: 1.0, 8: 1.4, 16: 2.0, 24: 3.0}, draft={})
    several = [costs.verify_seconds(count) for count in (0, 4, 8, 20, 24, 40)]
    assert several == pytest.approx([1.0, 1.2, 1.4, 2.5, 3.0, 5.0])
    falling = Costs(verify={0: 1.0, 8: 1.6, 16: 1.5}, draft={})
    assert falling.verify_seconds(40) == 1.5
    assert Costs(verify={0: 1.0}, draft={}).verify_seconds(40) == 1.0


def test_drafters_that_differ_in_one_setting_are_measured_separately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = TargetAdapter(tiny_llama())
    several = [BASE, *(BASE.model_copy(update=change) for change in OTHERS.values())]
    drafters = [tiny_drafter(target, settings) for settings in several]
    measured: list[JakiroDrafter] = []

    def measure(_: TargetAdapter, model: JakiroDrafter, *__: object, is_brief: bool) -> Costs:
        measured.append(model)
        return Costs(verify={0: 1.0}, draft={1: float(len(measured))})

    monkeypatch.setattr("inference.autotune.costs.measure_costs", measure)
    monkeypatch.setattr("inference.autotune.measurement.QUIET", float("inf"))
    first = [known_costs(target, drafter, tmp_path) for drafter in drafters]
    assert measured == drafters
    assert [known_costs(target, drafter, tmp_path) for drafter in drafters] == first
    assert measured == drafters  # no costs are measured twice
    assert len(list(tmp_path.iterdir())) == len(drafters)


@pytest.mark.parametrize(("name", "passes"), [("parallel-spec", 3), ("hidden-transfer", 1)])
def test_a_drafter_that_has_one_pass_is_timed_with_one_pass(name: str, passes: int) -> None:
    drafter = tiny_drafter(TargetAdapter(tiny_llama()), VARIANTS[name])
    assert timed_passes(drafter) == passes


def test_each_token_of_a_longer_context_costs_as_much_as_the_measured_ones() -> None:
    long = Costs(verify={0: 1.5, 24: 6.0}, draft={1: 0.4})
    costs = Costs(verify={0: 1.0, 24: 3.0}, draft={1: 0.5}, read=0.1, long=long)
    tokens = LONG_CONTEXT - CONTEXT
    assert costs.verify_growth(0) == pytest.approx(0.5 / tokens)
    assert costs.verify_growth(12) == pytest.approx(1.75 / tokens)
    uneven = Costs(
        verify={0: 1.0, 2: 9.0, 8: 1.2}, draft={}, long=Costs(verify={0: 2.0, 8: 2.4}, draft={})
    )
    assert uneven.verify_growth(2) == pytest.approx(1.05 / tokens)  # not lessened by the 9 seconds
    assert costs.draft_growth(1) == 0.0  # measured as shorter, which cannot be right
    short = costs.model_copy(update={"long": None})
    assert short.verify_growth(12) == short.draft_growth(1) == 0.0
    half = costs.between(Costs(verify={0: 3.0}, draft={}, read=0.3, long=long), 0.5)
    assert half.read == pytest.approx(0.2)
    assert half.long is not None
    assert half.long.verify == long.verify
    assert costs.between(short, 0.5).long is None


@pytest.mark.parametrize("positions", [512, 2 * LONG_CONTEXT])
def test_a_long_context_is_measured_if_the_target_allows_it(positions: int) -> None:
    target = TargetAdapter(tiny_llama(max_position_embeddings=positions))
    costs = measure_costs(target, tiny_drafter(target), 2)
    assert set(costs.draft) == {1, 2}
    assert costs.read >= 0
    assert (costs.long is not None) == (positions > 512)
    if costs.long is not None:
        assert set(costs.long.draft) == {1, 2}
        assert set(costs.long.verify) == {0, 8, 24}
