"""A small model's cache predicts what the model itself predicts after the same tokens."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from helpers.drafting import commit_of
from helpers.models import tiny_llama
from helpers.tables import frontier_of, no_processors
from transformers import LlamaForCausalLM

from inference.drafters.small_lm import (
    WAITING,
    LMPass,
    SmallLMDrafter,
    SmallLMSession,
    SmallLMSettings,
)
from inference.protocol import Committed
from inference.trees.builder import TreeLevel

VOCAB = 61
START = [1, 2, 3, 4]


@pytest.fixture(autouse=True)
def _inference_mode() -> Iterator[None]:
    """Run each test in inference mode, as an engine runs its sessions."""
    with torch.inference_mode():
        yield


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_llama(vocab=VOCAB, num_hidden_layers=2)


def _cache(model: LlamaForCausalLM, batch: int = 1, vocab_size: int = VOCAB) -> SmallLMSession:
    drafter = SmallLMDrafter(model, model, SmallLMSettings(depth=3, breadth=3))
    drafter.vocab_size = vocab_size
    return drafter.new_session(no_processors(), capacity=100, batch=batch)


def _committed(rows: Sequence[list[int]], counts: Sequence[int]) -> Committed:
    """Return a commit of the last `counts` tokens of each sequence before its root."""
    ends = tuple(len(row) - 1 for row in rows)
    width = max(counts)
    verified = [
        [*row[end - count : end], *[0] * (width - count)]
        for row, end, count in zip(rows, ends, counts, strict=True)
    ]
    roots = torch.tensor([row[-1:] for row in rows])
    return commit_of(ends, tuple(counts), torch.tensor(verified), roots, None)


def _started(cache: SmallLMSession, *rows: list[int]) -> LMPass:
    cache.advance(_committed(rows, [len(row) - 1 for row in rows]))
    return cache.start_tree()


def _expected(model: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)


def _level(tokens: list[int], origin: list[int], batch: int = 1) -> TreeLevel:
    return frontier_of(torch.tensor([tokens] * batch), torch.tensor([origin] * batch))


def _grown(cache: SmallLMSession, *rows: list[int]) -> LMPass:
    """Start a tree and read 5 and 6 below the root, then 7 below 6 and 8 below 5."""
    tree = _started(cache, *rows)
    tree.joint(1, None)
    tree.joint(2, _level([5, 6], [0, 0], len(rows)))
    tree.joint(3, _level([7, 8], [1, 0], len(rows)))
    return tree


def test_every_node_is_predicted_after_its_own_path(model: LlamaForCausalLM) -> None:
    tree = _started(_cache(model), START)
    levels = [
        (None, [[]]),
        (_level([5, 6], [0, 0]), [[5], [6]]),
        (_level([7, 8], [1, 0]), [[6, 7], [5, 8]]),
    ]
    for depth, (frontier, paths) in enumerate(levels, start=1):
        found = tree.joint(depth, frontier)[0, :, 0]
        expected = torch.stack([_expected(model, [*START, *path]) for path in paths])
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("path", [[6, 7], [5], [6, 8], []])
def test_after_an_accepted_path_predictions_are_those_of_the_whole_text(
    model: LlamaForCausalLM, path: list[int]
) -> None:
    cache = _cache(model)
    _grown(cache, START)
    text = [*START, *path, 9]
    cache.advance(_committed([text], [1 + len(path)]))
    found = cache.start_tree().joint(1, None)[0, 0, 0]
    torch.testing.assert_close(found, _expected(model, text), atol=1e-4, rtol=1e-4)


def test_sequences_that_are_left_keep_their_tokens_and_their_tree(model: LlamaForCausalLM) -> None:
    cache = _cache(model, batch=2)
    _grown(cache, [3, 3], START)
    cache.select_sequences([1])
    assert cache.lengths == (3,)
    text = [*START, 6, 7, 9]
    cache.advance(_committed([text], [3]))
    found = cache.start_tree().joint(1, None)[0, 0, 0]
    torch.testing.assert_close(found, _expected(model, text), atol=1e-4, rtol=1e-4)


def test_tokens_that_only_the_small_model_has_are_no_candidates(model: LlamaForCausalLM) -> None:
    found = _started(_cache(model, vocab_size=40), START).joint(1, None)[0, 0, 0]
    assert len(found) == 40
    assert float(found.exp().sum()) == pytest.approx(1.0)


@pytest.mark.parametrize(("length", "num_read"), [(WAITING, 0), (WAITING + 10, WAITING + 9)])
def test_long_texts_are_read_before_a_tree_is_requested(
    model: LlamaForCausalLM, length: int, num_read: int
) -> None:
    text = [1 + number % 60 for number in range(length)]
    cache = _cache(model)
    cache.advance(_committed([text], [length - 1]))
    assert cache._num_read == [num_read]
    found = cache.start_tree().joint(1, None)[0, 0, 0]
    torch.testing.assert_close(found, _expected(model, text), atol=1e-4, rtol=1e-4)


def test_gaps_are_refused_and_tokens_are_taken_back(model: LlamaForCausalLM) -> None:
    cache = _cache(model)
    _grown(cache, START)
    with pytest.raises(ValueError, match="session ends at"):
        cache.advance(_committed([[*START, 5, 6, 7]], [1]))
    cache.rollback(2)
    assert cache.lengths == (2,)
    text = [1, 2, 8, 9]
    cache.advance(_committed([text], [1]))
    found = cache.start_tree().joint(1, None)[0, 0, 0]
    torch.testing.assert_close(found, _expected(model, text), atol=1e-4, rtol=1e-4)
