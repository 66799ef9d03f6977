"""Costs of trees and batches of any size follow from those that were timed."""

from pathlib import Path

import pytest
from helpers.models import tiny_drafter, tiny_llama
from helpers.variants import VARIANTS

from inference.autotune.costs import Costs, costs_with, timed_passes
from inference.drafters.trained.drafter import TrainedDrafter, default_tree
from jakiro.target.adapter import TargetAdapter


def test_verification_is_interpolated_and_larger_trees_cost_more() -> None:
    costs = Costs(verify={0: 1.0, 8: 1.4, 16: 2.0, 24: 3.0}, draft={})
    several = [costs.verify_seconds(count) for count in (0, 4, 8, 20, 24, 40)]
    assert several == pytest.approx([1.0, 1.2, 1.4, 2.5, 3.0, 5.0])
    falling = Costs(verify={0: 1.0, 8: 1.6, 16: 1.5}, draft={})
    assert falling.verify_seconds(40) == 1.5
    assert Costs(verify={0: 1.0}, draft={}).verify_seconds(40) == 1.0


def test_a_batch_costs_what_as_many_tokens_cost() -> None:
    costs = Costs(verify={0: 1.0, 8: 1.8, 24: 3.4}, draft={1: 0.5}, read=0.1)
    two = costs.of_batch(2)
    assert [two.verify[count] for count in (0, 8, 24)] == pytest.approx([1.1, 2.7, 5.9])
    assert two.draft == pytest.approx({1: 0.5 * 2.7 / 1.8})
    assert two.read == costs.read
    assert costs.of_batch(1).verify_seconds(5) == pytest.approx(costs.verify_seconds(5))


@pytest.mark.parametrize(
    ("name", "passes"), [("parallel-spec", 3), ("hidden-transfer", 1), ("block", 1)]
)
def test_a_drafter_that_has_one_pass_is_timed_with_one_pass(name: str, passes: int) -> None:
    target = TargetAdapter(tiny_llama())
    drafter = tiny_drafter(target, VARIANTS[name])
    assert timed_passes(drafter) == passes
    costs = costs_with(target, TrainedDrafter(drafter, target, default_tree(drafter)))
    assert set(costs.draft) == set(range(1, passes + 1))
    assert all(seconds > 0 for seconds in (*costs.verify.values(), *costs.draft.values()))
    assert costs.read >= 0


def test_each_target_is_timed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.autotune.costs.user_cache_path", lambda _: tmp_path / "new")
    usual, other = TargetAdapter(tiny_llama()), TargetAdapter(tiny_llama(hidden_size=16))
    first, different, again = (costs_with(target, None) for target in (usual, other, usual))
    assert first == again != different
    models = [tiny_drafter(usual, VARIANTS[name]) for name in ("eagle", "eagle3")]
    eagle, eagle3 = (TrainedDrafter(model, usual, default_tree(model)) for model in models)
    assert costs_with(usual, eagle) == costs_with(usual, eagle) != costs_with(usual, eagle3)
    usual.fuse()  # steps take another time
    assert costs_with(usual, None) != first
