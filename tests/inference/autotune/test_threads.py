"""The fastest number of threads is used, while the load changes, too, and changes no token."""

from typing import Any

import pytest
import torch
from helpers.losslessness import greedy_by_transformers
from helpers.models import tiny_llama

from inference import SpeculativeDecoder
from inference.autotune import threads
from inference.autotune.costs import NODE_COUNTS, Costs, costs_with
from inference.autotune.policy import AutoTree
from inference.autotune.threads import (
    LONGEST_PAUSE,
    TRIAL,
    ThreadSwitch,
    choose_threads,
    contending_threads,
)
from inference.drafters.lookup import LookupDrafter
from inference.protocol import Budget
from jakiro.target.adapter import TargetAdapter


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> TargetAdapter:
    """A target whose steps take a second with one thread, 0.7 with two, and two with four."""
    monkeypatch.setattr(threads.torch, "get_num_threads", lambda: 4)
    seconds = {1: 1.0, 2: 0.7, 4: 2.0}
    monkeypatch.setattr(
        threads, "shortest_seconds", lambda works, _: {key: seconds[key[0]] for key in works}
    )
    return TargetAdapter(tiny_llama())


def test_the_fastest_number_of_threads_is_chosen(target: TargetAdapter) -> None:
    assert choose_threads(target, "auto", drafts=True) == 2
    assert choose_threads(target, 3, drafts=True) == 3
    assert choose_threads(target, None, drafts=False) is None


def test_only_clearly_slower_numbers_cannot_be_the_fastest_elsewhere(target: TargetAdapter) -> None:
    assert contending_threads(target, "auto") == [1, 2]


def test_a_target_with_few_positions_is_timed_with_small_trees() -> None:
    model = tiny_llama(vocab=23, max_position_embeddings=32)
    assert 1 < len(costs_with(TargetAdapter(model), None).verify) < len(NODE_COUNTS)
    decoder = SpeculativeDecoder(model, LookupDrafter(), threads="auto")
    assert len(decoder.generate([1, 2, 1, 2], max_new_tokens=9).new_token_ids) == 9


def _used(switch: ThreadSwitch, count: int, *seconds: float) -> list[int]:
    """Return the index that each of the next steps uses, if steps take so long with each."""
    used = []
    for _ in range(count):
        used.append(switch.index)
        switch.learn(switch.index, [1.0, 1.5], seconds[switch.index], is_alone=True)
    return used


def test_a_number_of_threads_is_tried_seldom_where_it_is_slower() -> None:
    switch = ThreadSwitch([None, 1])
    assert sum(_used(switch, 4 * LONGEST_PAUSE, 1.0, 1.5)) <= 4 * TRIAL
    # Two threads are as slow as one, so trials become ever rarer.
    used = _used(switch, 4 * LONGEST_PAUSE, 1.8, 1.7)
    assert TRIAL <= sum(used) <= 0.02 * len(used)


def test_the_number_of_threads_follows_the_load_of_the_machine() -> None:
    switch = ThreadSwitch([None, 1])
    _used(switch, 300, 1.0, 1.5)
    assert all(_used(switch, 80, 4.0, 1.8)[40:])
    assert not any(_used(switch, 400, 1.0, 1.5)[-100:])


def test_a_number_that_is_modeled_as_slower_is_tried_nevertheless() -> None:
    switch = ThreadSwitch([None, 1])
    assert all(_used(switch, LONGEST_PAUSE + 200, 1.0, 0.5)[-100:])


def test_a_step_that_was_interrupted_is_no_change_of_load() -> None:
    switch = ThreadSwitch([None, 1])
    for seconds in (1.0, 9.0, 1.0, 1.0):
        switch.learn(0, [1.0, 1.5], seconds, is_alone=True)
    assert switch._loads[0][True].recent < 1.3


@pytest.mark.parametrize("drafter", [None, LookupDrafter()], ids=["no drafter", "lookup"])
def test_a_changing_number_of_threads_changes_no_token(
    drafter: LookupDrafter | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "SHORTEST_PAUSE", 4)
    before, used = torch.get_num_threads(), []
    model = tiny_llama(vocab=11)
    decoder = SpeculativeDecoder(model, drafter)
    # Steps take longer than modeled, so another number may always be faster.
    costs, other = Costs(verify={0: 1e-6}, draft={}), Costs(verify={0: 1e-9}, draft={})
    trees = None if drafter is None else Budget(8)
    decoder.policy = AutoTree(trees, costs, other_threads={before + 1: other})
    forward = decoder.target.forward

    def noted(*inputs: Any) -> object:
        used.append(torch.get_num_threads())
        return forward(*inputs)

    monkeypatch.setattr(decoder.target, "forward", noted)
    output = decoder.generate([1, 2, 3], max_new_tokens=60, temperature=0)
    assert output.sequences[0].tolist() == greedy_by_transformers(model, [1, 2, 3], 60)
    assert {before, before + 1} == set(used)
    assert torch.get_num_threads() == before
    used.clear()
    decoder.generate([1, 2, 3], max_new_tokens=60, temperature=0.8, seed=1)
    assert set(used) == {before}  # with a seed, everything stays as selected at the start
