"""Steps that start before the previous result is read give the same tokens and statistics."""

from collections.abc import Sequence
from itertools import product
from typing import Any
from weakref import ref

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama
from helpers.quick import mostly_slow
from helpers.recordings import Replayed

from inference.drafters.trained.drafter import TrainedDrafter
from inference.engine import captured, device_step
from inference.engine.captured import CapturedPool
from inference.engine.loop import DecodeRun
from inference.engine.request import Request
from inference.generation.preparation import prepare_requests
from inference.trees.shape import TreeShape
from jakiro.errors import NumericalError
from jakiro.target.adapter import TargetAdapter

PROMPTS = ([1, 2, 3], [4, 5], [6, 7, 8, 9], [3, 1])
SELECTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True},
    "nucleus": {"do_sample": True, "top_p": 0.9, "temperature": 0.7},
}
TREES = {
    "deterministic": TreeShape(children=2, breadth=2, num_nodes=6),
    "sampled": TreeShape(children=2, breadth=2, sampled=True),
}


@pytest.fixture(autouse=True)
def _replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_step, "RecordedFunction", Replayed)
    monkeypatch.setattr(captured, "STRIDE", 32)


def _requests(
    target: TargetAdapter, prompts: Sequence[list[int]], **generation: object
) -> list[Request]:
    requests, _ = prepare_requests(
        target.model, prompts, generation, seed=3, max_position=target.spec.max_position
    )
    return requests


def _drafter(target: TargetAdapter, tree: str = "deterministic") -> TrainedDrafter:
    return TrainedDrafter(tiny_drafter(target), target, TREES[tree])


def _both(
    target: TargetAdapter,
    drafter: TrainedDrafter | None,
    prompts: Sequence[list[int]],
    **generation: object,
) -> tuple[DecodeRun, DecodeRun]:
    """Return a finished run without captured steps, and one with captured steps."""
    one, other = (_requests(target, prompts, **generation) for _ in range(2))
    pool = CapturedPool()
    run = DecodeRun(target, drafter, other, pool=pool)
    assert run.captured is not None
    return DecodeRun(target, drafter, one).finish(), run.finish()


def _assert_same(one: DecodeRun, other: DecodeRun) -> None:
    for own, expected in zip(other.sequences, one.sequences, strict=True):
        assert own.token_ids == expected.token_ids
        assert own.stats.emitted == expected.stats.emitted
        assert own.stats.accepted == expected.stats.accepted
        assert own.stats.target_forwards == expected.stats.target_forwards


# Every tree and every selection.
QUICK_PAIRS = {("deterministic", "greedy"), ("sampled", "nucleus"), (None, "sampled")}


@pytest.mark.parametrize("batch", mostly_slow([1, 3], quick=[3]))
@pytest.mark.parametrize(
    "pair", mostly_slow(product([*TREES, None], SELECTIONS), quick=QUICK_PAIRS), ids=str
)
def test_tokens_and_statistics_are_those_of_uncaptured_steps(
    pair: tuple[str | None, str], batch: int
) -> None:
    tree, selection = pair
    target = TargetAdapter(tiny_llama())
    drafter = None if tree is None else _drafter(target, tree)
    generation = {"max_new_tokens": 40, **SELECTIONS[selection]}  # longer than a stride
    _assert_same(*_both(target, drafter, PROMPTS[:batch], **generation))


@pytest.mark.parametrize("count", range(1, 5))
def test_a_length_limit_may_cut_an_accepted_path(count: int) -> None:
    target = TargetAdapter(tiny_llama())
    _assert_same(*_both(target, _drafter(target), PROMPTS[:2], max_new_tokens=count))


def test_sequences_end_on_their_own() -> None:
    target = TargetAdapter(tiny_llama(vocab=11))
    prompts, drafter = [[n, 1] for n in range(6)], _drafter(target)
    generation = {
        "max_new_tokens": 40,
        "do_sample": True,
        "temperature": 3.0,
        "eos_token_id": [3, 4],
    }
    one, other = _both(target, drafter, prompts, **generation)
    _assert_same(one, other)
    assert len({len(state.token_ids) for state in other.sequences}) > 2


def test_positions_never_exceed_the_targets_limit() -> None:
    model = tiny_llama(max_position_embeddings=48)
    target = TargetAdapter(model)
    _assert_same(*_both(target, _drafter(target), PROMPTS[:2], max_new_tokens=44))


def test_requests_may_join_while_a_step_is_under_way() -> None:
    target = TargetAdapter(tiny_llama())
    drafter = _drafter(target, "sampled")
    requests = _requests(target, PROMPTS, max_new_tokens=40, do_sample=True)
    alone = [DecodeRun(target, drafter, request).finish() for request in requests]
    run = DecodeRun(target, drafter, requests[:2], pool=CapturedPool())
    was_captured = False
    for number, _ in enumerate(run):
        was_captured |= run.captured.is_running
        if number in (3, 7):
            run.admit([requests[2 if number == 3 else 3]])
    assert was_captured
    assert [state.token_ids for state in run.sequences] == [own.token_ids for own in alone]


@pytest.mark.parametrize("do_sample", [False, True])
def test_logits_that_are_not_finite_end_the_run_whose_caches_are_not_used_again(
    do_sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, pool = TargetAdapter(tiny_llama()), CapturedPool()
    (request,) = _requests(target, [[1, 2, 3]], max_new_tokens=30, do_sample=do_sample)
    run = DecodeRun(target, _drafter(target), request, pool=pool)
    steps = iter(run)
    next(steps)
    emitted = len(run.token_ids)
    logits = target.logits
    monkeypatch.setattr(target, "logits", lambda features: logits(features) * float("nan"))
    with pytest.raises(NumericalError, match="not finite"):
        next(steps)
    assert len(run.token_ids) == emitted
    assert pool._unused == []


def test_a_later_run_takes_over_the_caches_and_recorded_steps() -> None:
    target = TargetAdapter(tiny_llama())
    drafter, pool, addresses, counts = _drafter(target), CapturedPool(), [], []
    expected = []
    for prompt in PROMPTS[:2]:
        (request,) = _requests(target, [prompt], max_new_tokens=30)
        run = DecodeRun(target, drafter, request, pool=pool)
        addresses.append(run.context.cache.slot_layers[0].keys.data_ptr())
        own = run.captured
        expected.append(DecodeRun(target, drafter, request).finish().token_ids)
        assert run.finish().token_ids == expected[-1]
        counts.append(len(own.recorded))
    assert len(set(addresses)) == 1
    assert len(set(counts)) == 1


def test_a_request_keeps_its_own_options_after_the_first_request_has_ended() -> None:
    target = TargetAdapter(tiny_llama())
    (greedy,) = _requests(target, [[1, 2, 3]], max_new_tokens=6, do_sample=False)
    (sampled,) = _requests(target, [[4, 5]], max_new_tokens=40, do_sample=True)
    (penalized,) = _requests(
        target, [[6, 7]], max_new_tokens=40, do_sample=False, repetition_penalty=1.8
    )
    alone = [
        DecodeRun(target, None, own).finish().token_ids for own in (greedy, sampled, penalized)
    ]
    for later, expected in ((sampled, alone[1]), (penalized, alone[2])):
        run = DecodeRun(target, None, greedy, pool=CapturedPool())
        for number, _ in enumerate(run):
            if number == 1:
                run.admit([later])
        assert [state.token_ids for state in run.sequences] == [alone[0], expected]


def test_caches_are_not_used_again_after_the_weights_have_changed() -> None:
    target, pool = TargetAdapter(tiny_llama()), CapturedPool()
    (request,) = _requests(target, [[1, 2, 3]], max_new_tokens=9)
    DecodeRun(target, None, request, pool=pool).finish()
    (unused,) = pool._unused
    with torch.no_grad():
        next(iter(target.model.parameters())).mul_(1.5)
    run = DecodeRun(target, None, request, pool=pool)
    assert run.captured is not unused
    assert run.finish().token_ids == DecodeRun(target, None, request).finish().token_ids


def test_an_abandoned_run_is_freed_at_once() -> None:
    target = TargetAdapter(tiny_llama())
    (request,) = _requests(target, [[1, 2, 3]], max_new_tokens=9)
    run = DecodeRun(target, None, request, pool=CapturedPool())
    context = ref(run.context)
    del run
    assert context() is None
