"""The trees of a lane shrink with the number of sequences, unless a sequence samples."""

from typing import Any

import pytest
from helpers.lanes import Work, finish, request_of, start
from helpers.models import tiny_llama
from transformers import LogitsProcessorList

from inference import SpeculativeDecoder
from inference.autotune.costs import Costs
from inference.autotune.policy import AutoTree, ReproducibleTree
from inference.drafters.lookup import LookupDrafter, LookupSettings
from inference.engine.context import Context
from inference.engine.lane import Lane
from inference.engine.policy import AlwaysDraft
from inference.engine.request import SequenceState
from inference.protocol import Budget
from inference.sampling.options import Sampling

GREEDY = Sampling(LogitsProcessorList(), do_sample=False)
SAMPLED = Sampling(LogitsProcessorList(), do_sample=True)
COSTS = Costs(verify={0: 1.0, 15: 1.05, 24: 1.5, 52: 9.0}, draft={})
TREES = ReproducibleTree(AutoTree(Budget(12, 12), COSTS), places=4)


def _size(sampling: Sampling, count: int) -> int:
    budget = TREES.new_run(sampling, count).budget
    return 0 if budget is None else budget.num_nodes


def test_greedy_trees_are_larger_for_fewer_sequences() -> None:
    sizes = [_size(GREEDY, count) for count in (1, 2, 3, 4)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1] > 0
    assert {_size(SAMPLED, count) for count in (1, 2, 3, 4)} == {_size(SAMPLED, 4)}


@pytest.mark.parametrize("is_mixed", [False, True])
def test_the_text_is_that_of_each_request_alone(
    is_mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = LookupDrafter(LookupSettings(num_nodes=12, depth=12))
    decoder = SpeculativeDecoder(tiny_llama(vocab=11), drafter, tree="fixed")
    decoder.policy = AlwaysDraft(Budget(_size(GREEDY, 4), 12))
    lengths = [10, 20, 30, 40]
    works = [
        Work(
            [1 + number, 2, 1 + number, 2],
            number,
            {"temperature": 0.8 if is_mixed and number == 3 else 0, "max_new_tokens": length},
        )
        for number, length in enumerate(lengths)
    ]
    alone = [work.alone(decoder).new_token_ids for work in works]
    lane = Lane(decoder.target, drafter, GREEDY, 4, 64, TREES)
    propose = Context.propose
    seen: set[tuple[int, int]] = set()

    def noted(context: Context, token_ids: Any, budget: Budget, *others: Any) -> Any:
        seen.add((len(token_ids), budget.num_nodes))
        return propose(context, token_ids, budget, *others)

    monkeypatch.setattr(Context, "propose", noted)
    states = [SequenceState.of(n, request_of(decoder, work)) for n, work in enumerate(works)]
    for state in states:
        start(lane, state)
    finish(lane)
    assert [state.new_token_ids for state in states] == alone
    counts = {count for count, _ in seen}
    assert {1, 4} <= counts
    expected = {(count, _size(GREEDY, 4 if is_mixed else count)) for count in counts}
    assert seen == expected
