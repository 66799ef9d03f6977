"""Batches of a few texts, each of which is a sequence of its own."""

from collections.abc import Iterator, Sequence

import numpy as np

from inference.adaptation.lesson import Passage
from training.data.packing import PackedSequence, collate
from training.loss.anchors import AnchorRule
from training.loss.batch import Batch


def cut(passage: Passage, max_length: int) -> Passage:
    """Return a passage of at most `max_length` tokens, whose continuation begins where it began.

    The continuation loses its end, but keeps half of `max_length` or what fits after the prompt.
    Then the prompt loses its beginning.

    Args:
        max_length: largest number of tokens, at least 2.
    """
    room = max(max_length // 2, max_length - passage.prompt_length)
    ids = passage.token_ids[: passage.prompt_length + room]
    start = max(len(ids) - max_length, 0)
    return Passage(token_ids=ids[start:], prompt_length=passage.prompt_length - start)


def batches(
    passages: Sequence[Passage], size: int, passes: int, rule: AnchorRule, seed: int
) -> Iterator[Batch]:
    """Yield batches of all passages, each time in another random order.

    A batch is as long as its longest passage.
    """
    for number in range(passes):
        order = np.random.default_rng((seed, number)).permutation(len(passages))
        for begin in range(0, len(order), size):
            indices = [int(index) for index in order[begin : begin + size]]
            length = max(len(passages[index].token_ids) for index in indices)
            keyed = [(_row(passages[own], length), (seed, number, own)) for own in indices]
            yield collate(
                (row, rule.anchors(row.document_starts, key, row.is_response)) for row, key in keyed
            )


def _row(passage: Passage, length: int) -> PackedSequence:
    """Return a passage with padding at its end; the drafter learns the continuation only."""
    count = len(passage.token_ids)
    index = np.arange(length)
    token_ids = np.zeros(length, np.int64)
    token_ids[:count] = passage.token_ids
    is_padding = index >= count
    return PackedSequence(
        token_ids=token_ids,
        positions=np.where(is_padding, index - count, index),
        documents=np.where(is_padding, -1, 0),
        is_response=(index >= passage.prompt_length) & ~is_padding,
    )
