"""A drafter writes token by token; its text is offered as it was sampled, and only once."""

from typing import Any

import pytest
from helpers.models import tiny_llama
from helpers.remote import mixed, opening, sequence_tree, tensors

from inference.device.drafting import DeviceDrafting
from inference.device.offline_text import AloneWriter, ProvisionalText, ProvisionalToken, alone_key
from inference.draft_tree import ROOT
from inference.drafters.small_lm import SmallLMDrafter
from inference.protocol import Drafter
from inference.remote.messages import OpenSession, TreeLimits
from inference.remote.tree_frame import decode_step, encode_step
from inference.sampling.integer_distribution import TOTAL
from inference.sampling.random_numbers import random_stream

TOKENS = [
    ProvisionalToken(4, (4, 5), (TOTAL - 8, 8)),
    ProvisionalToken(6),
    ProvisionalToken(2, (1, 2, 3), (1, TOTAL - 2, 1)),
]
TEXT = ProvisionalText([7, 8], TOKENS)


@pytest.mark.parametrize(
    ("emitted", "rest"),
    [
        ([7, 8, 4], TOKENS[1:]),
        ([7, 8, 4, 6], TOKENS[2:]),
        ([7, 8, 4, 6, 2], []),
        ([7, 8, 4, 6, 2, 9], []),
        ([7, 8, 5], []),  # the target's token after the guess is another one
        ([7, 9], []),  # the guess was wrong
        ([7, 8], []),
        ([7], []),
    ],
)
def test_only_what_continues_a_verdict_survives(
    emitted: list[int], rest: list[ProvisionalToken]
) -> None:
    found = TEXT.after(emitted)
    assert (found.guess, found.written) == ([], rest)


def test_without_a_submitted_tree_all_tokens_may_survive() -> None:
    assert ProvisionalText(written=TOKENS).after([4]).written == TOKENS[1:]


def test_a_chain_keeps_the_distributions_of_its_tokens() -> None:
    chain = ProvisionalText(written=TOKENS).chain(longest=9)
    assert [chain.token_ids[node] for node in chain.best_path()] == [4, 6, 2]
    assert chain.parent == [ROOT, 0, 1]
    assert (chain.sampled, chain.deterministic) == ({ROOT: [0], 1: [2]}, {0: [1]})
    for parent, token in ((ROOT, TOKENS[0]), (1, TOKENS[2])):
        ids, probs = chain.draft_distribution(parent)
        expected = dict(zip(token.ids, token.weights, strict=True))
        found = {i: p * TOTAL for i, p in zip(ids.tolist(), probs.tolist(), strict=True) if p}
        assert found == expected
    received = decode_step(encode_step(3, 1, chain).body).tree
    assert received.parents.tolist() == [-1, 0, 1]
    assert received.weights.sum(axis=1).tolist() == [TOTAL, TOTAL]


def test_the_guess_is_the_best_path_down_to_a_leaf() -> None:
    assert sequence_tree(mixed()).best_path() == [0, 2]
    tree = sequence_tree(tensors([3, 5, 2, 4], [ROOT, ROOT, 0, 1]))
    tree.rank[:] = [2, 0, 3, 1]
    assert tree.best_path() == [1, 3]
    assert sequence_tree(tensors([], [])).best_path() == []


PROMPT = [5, 6, 7, 8, 5, 6, 7, 8, 5]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


def _drafting(drafter: Drafter | None, samples: bool = False) -> DeviceDrafting:
    request = OpenSession(prompt=PROMPT, seed=3, max_tokens=100)
    changes = {"samples": samples, "limits": TreeLimits()}
    return DeviceDrafting(drafter, request, opening().model_copy(update=changes))


def _written(drafting: DeviceDrafting, count: int, attempt: int = 1) -> list[Any]:
    writer = AloneWriter(drafting, PROMPT, 2, attempt, count)
    tokens: list[Any] = []
    for _ in range(count):
        token = writer.next([own.token_id for own in tokens])
        if token is None:
            break
        tokens.append(token)
    writer.stop()
    return tokens


def test_sampled_tokens_keep_their_distributions(model: Any) -> None:
    drafting = _drafting(SmallLMDrafter(model, model), samples=True)
    tokens = _written(drafting, 6)
    assert tokens == _written(drafting, 6)
    assert tokens != _written(drafting, 6, attempt=2)
    for token in tokens:
        assert sum(token.weights) == TOTAL
        assert token.weights[token.ids.index(token.token_id)] > 0


def test_nothing_is_written_without_a_drafter() -> None:
    assert _written(_drafting(None), 5) == []


def test_random_numbers_are_used_once() -> None:
    step = (3, 0, 0, 5)
    keys = [alone_key(step, attempt, number) for attempt in (1, 2) for number in (1, 2)]
    drafts = [(*step, purpose) for purpose in (0, 1)] + [(3, 0, 0, 6, 1)]
    numbers = {random_stream(*key).random() for key in [*keys, *drafts]}
    assert len(numbers) == len(keys) + len(drafts)
