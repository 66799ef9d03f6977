"""Recorded steps depend on nothing that the host knew when they were recorded."""

from functools import partial
from itertools import cycle, product
from typing import Any

import pytest
from helpers.lanes import Work, played
from helpers.models import tiny_drafter, tiny_llama
from helpers.quick import mostly_slow
from helpers.recordings import Recorded
from helpers.variants import VARIANTS

from inference import SpeculativeDecoder
from inference.drafters.trained.drafter import TrainedDrafter
from inference.engine import accept_batched, captured, device_step
from inference.engine.captured import CapturedPool
from inference.engine.lane import Lane
from inference.engine.loop import DecodeRun
from inference.engine.policy import AlwaysDraft, RunProgress
from inference.generation.preparation import prepare_requests
from inference.protocol import Budget
from inference.trees.shape import TreePlan, TreeShape
from jakiro.target import weights
from jakiro.target.adapter import TargetAdapter

TREES = {
    "deterministic": TreeShape(children=2, breadth=2, num_nodes=6),
    "sampled": TreeShape(children=3, breadth=2, sampled=True),
}
QUICK = {"hidden-unordered", "tail-1", "feedback-mixture-P2", "hybrid-sum-hidden-fused"}


@pytest.fixture(autouse=True)
def _recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_step, "RecordedFunction", Recorded)
    monkeypatch.setattr(weights, "_can_multiply", lambda _: False)  # such weights are not copied
    monkeypatch.setattr(captured, "STRIDE", 64)
    monkeypatch.setattr(accept_batched._Descent, "_is_over", lambda self: False)
    monkeypatch.setattr("helpers.lanes.Lane", partial(Lane, captured=True))


def _works(*options: dict[str, Any]) -> list[Work]:
    return [
        Work([1 + index, 2, 3 + index % 2], index, {"max_new_tokens": 6 + 2 * index, **own})
        for index, own in enumerate(options)
    ]


def _assert_same_as_alone(decoder: SpeculativeDecoder, works: list[Work], seed: int) -> None:
    states = played(decoder, works, {1: 3}, seed)
    for index, (work, state) in enumerate(zip(works, states, strict=True)):
        alone = work.alone(decoder).new_token_ids
        if index == 1:
            alone = alone[: len(state.new_token_ids)]
        assert state.new_token_ids == alone


QUICK_PAIRS = {("deterministic", 0.9), ("sampled", 1.0), (None, 1.0)}


@pytest.mark.parametrize("seed", mostly_slow(range(4), quick=[1]))
@pytest.mark.parametrize(
    "pair",
    mostly_slow(product(["deterministic", "sampled", None], [1.0, 0.9]), quick=QUICK_PAIRS),
    ids=str,
)
def test_temperatures_may_differ_and_change(pair: tuple[str | None, float], seed: int) -> None:
    tree, top_p = pair
    model = tiny_llama(vocab=11)
    drafter = None if tree is None else tiny_drafter(TargetAdapter(model))
    decoder = SpeculativeDecoder(model, drafter, tree=TREES[tree or "sampled"])
    temperatures = (0.5, 1.0, 1.3, 0.8, 2.0, 1.0)
    works = _works(*({"temperature": value, "top_p": top_p} for value in temperatures))
    _assert_same_as_alone(decoder, works, seed)


@pytest.mark.parametrize("name", mostly_slow(VARIANTS, quick=QUICK))
def test_every_kind_of_drafter_can_be_recorded(name: str) -> None:
    model = tiny_llama()
    settings = VARIANTS[name]
    shape = TreeShape(
        autoregressive_levels=2,
        parallel_levels=settings.schedule.parallel_levels,
        children=2,
        breadth=2,
        num_nodes=6,
    )
    drafter = tiny_drafter(TargetAdapter(model), settings)
    decoder = SpeculativeDecoder(model, drafter, tree=shape)
    _assert_same_as_alone(decoder, _works(*[{"temperature": 0}] * 4), seed=1)


class _Turns(AlwaysDraft):
    """A policy whose trees change in every step."""

    def __init__(self) -> None:
        super().__init__(None)
        self.turns = cycle([Budget(6, 2), Budget(1, 1), Budget(6, 1), None])

    def next_budget(self, progress: RunProgress) -> Budget | None:
        return next(self.turns)


@pytest.mark.parametrize("do_sample", [False, True])
def test_recorded_steps_of_several_sizes_take_turns(do_sample: bool) -> None:
    target, pool = TargetAdapter(tiny_llama()), CapturedPool()
    plan = TreePlan(greedy=TREES["deterministic"], sampling=TREES["sampled"])
    drafter = TrainedDrafter(tiny_drafter(target), target, plan)
    generation = {"max_new_tokens": 30, "do_sample": do_sample}
    for prompts in ([[1, 2, 3], [4, 5], [6, 7, 8, 9]], [[9, 8], [3]]):  # the second from the pool
        one, other = (
            prepare_requests(target.model, prompts, generation, seed=3, max_position=512)[0]
            for _ in range(2)
        )
        alone = DecodeRun(target, drafter, one, policy=_Turns()).finish()
        run = DecodeRun(target, drafter, other, policy=_Turns(), pool=pool).finish()
        own, expected = ([state.token_ids for state in each.sequences] for each in (run, alone))
        assert own == expected


def test_a_step_is_recorded_once_for_all_temperatures() -> None:
    model = tiny_llama(vocab=11)
    decoder = SpeculativeDecoder(model, captured=True)
    for temperature in (0.5, 1.0, 1.4):
        decoder.generate([1, 2, 3], temperature=temperature, seed=1, max_new_tokens=12)
    assert decoder._pool is not None
    (own,) = decoder._pool._unused
    assert len(own.recorded) == 1
