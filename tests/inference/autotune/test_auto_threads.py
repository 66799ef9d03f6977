"""Decoding without drafts computes with another number of threads while this is faster."""

from typing import Any

import pytest
import torch
from helpers.losslessness import greedy_by_transformers
from helpers.models import tiny_llama
from helpers.tables import no_processors

from inference import SpeculativeDecoder
from inference.autotune.auto_threads import AutoThreads
from inference.autotune.costs import Costs
from inference.autotune.policy import fixed_policy, policy_for
from inference.engine.policy import AlwaysDraft, RunProgress
from jakiro.target.adapter import TargetAdapter

GREEDY = no_processors(do_sample=False)
COSTS, SLOWER = (Costs(verify={0: seconds}, draft={}) for seconds in (0.02, 0.03))


def test_another_number_of_threads_is_used_while_the_machine_is_busy() -> None:
    run = AutoThreads(COSTS, {1: SLOWER}).new_run(GREEDY, 1)

    def used(count: int, of_own: float, of_other: float) -> list[int | None]:
        numbers = []
        for _ in range(count):
            assert run.next_budget(RunProgress()) is None
            numbers.append(run.threads)
            run.learn([], [], of_own if run.threads is None else of_other, None)
        return numbers

    assert not used(300, 0.02, 0.03).count(1)
    assert used(60, 0.08, 0.04)[-30:] == [1] * 30
    assert used(300, 0.02, 0.03)[-30:] == [None] * 30


def test_servers_and_samples_with_a_seed_keep_the_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    target = TargetAdapter(tiny_llama())
    policy = policy_for(target, None, "auto", 2, adapts=True)
    assert isinstance(policy, AutoThreads)
    assert list(policy.other_threads) == [1]
    assert isinstance(policy_for(target, None, "auto", 2), AlwaysDraft)
    for fixed in (policy.reproducible(), fixed_policy(policy, 4)):
        assert isinstance(fixed, AlwaysDraft)
        assert fixed.budget is fixed.threads is None


def test_a_changing_number_of_threads_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.autotune.thread_choice.SHORTEST_PAUSE", 4)
    monkeypatch.setattr("inference.autotune.thread_choice.LONGEST_PAUSE", 4)
    before, used = torch.get_num_threads(), []
    model = tiny_llama(vocab=11)
    decoder = SpeculativeDecoder(model)
    decoder.policy = AutoThreads(COSTS, {before + 1: COSTS})
    forward = decoder.target.forward

    def noted(*inputs: Any) -> object:
        used.append(torch.get_num_threads())
        return forward(*inputs)

    monkeypatch.setattr(decoder.target, "forward", noted)
    output = decoder.generate([1, 2, 3], max_new_tokens=60, temperature=0)
    assert output.sequences[0].tolist() == greedy_by_transformers(model, [1, 2, 3], 60)
    assert set(used) == {before, before + 1}
    assert torch.get_num_threads() == before
    used.clear()
    decoder.generate([1, 2, 3], max_new_tokens=60, temperature=0.8, seed=1)
    assert set(used) == {before}
