"""Text that a device writes while no verdict arrives; without input or output.

    verified text, root | guess | sampled one by one
                          ^ path of the submitted tree, which may turn out to be wrong

The guess is a path of the tree that was submitted before the connection was lost. What follows it
is drafted token by token, each from a distribution that is kept with it, with random numbers that
nothing else uses. The verdict of the submitted tree comes first. If the provisional text begins
with all of its tokens, the rest is submitted as the chain of the next step, and the target decides
how much of it stays. A token after the guess was sampled independently of whether the guess was
right, so the text follows the target's distribution.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from inference.draft_tree import CandidateKind, SequenceTree
from inference.remote.integer_distribution import quantized, sample_columns
from inference.remote.received_tree import to_draft_tree
from inference.remote.tree_tensors import TreeTensors

SUPPORT = 32  # number of tokens of a distribution that a provisional token is sampled from


class ProvisionalToken(NamedTuple):
    """A token that was written alone, with the distribution that it was sampled from."""

    token_id: int
    ids: tuple[int, ...] = ()  # empty if the token was selected without sampling
    weights: tuple[int, ...] = ()  # integer weights of these ids


class ProvisionalText:
    """The provisional tokens after the root.

    Args:
        guess: tokens that the submitted tree may turn out to emit; none if there is no such tree.
    """

    def __init__(self, guess: Sequence[int] = (), written: Sequence[ProvisionalToken] = ()) -> None:
        self.guess = list(guess)
        self.written = list(written)

    @property
    def token_ids(self) -> list[int]:
        """All provisional tokens."""
        return [*self.guess, *(token.token_id for token in self.written)]

    def after(self, emitted: Sequence[int]) -> "ProvisionalText":
        """Return the provisional text after the tokens of the submitted tree's verdict.

        It is empty unless the verdict emits the whole guess and the token that was written after
        it, and contains only tokens that were written alone.
        """
        count = len(emitted)
        if count <= len(self.guess) or self.token_ids[:count] != list(emitted):
            return ProvisionalText()
        return ProvisionalText(written=self.written[count - len(self.guess) :])

    def chain(self, longest: int) -> SequenceTree:
        """Return the written tokens as a draft tree with a single path."""
        assert not self.guess, "the submitted tree comes first"
        written = self.written[:longest]
        sampled = [index for index, token in enumerate(written) if token.weights]
        width = max((len(written[index].ids) for index in sampled), default=0)
        ids = np.zeros((len(sampled), width), np.int32)
        weights = np.zeros((len(sampled), width), np.uint16)
        for row, index in enumerate(sampled):
            ids[row, : len(written[index].ids)] = written[index].ids
            weights[row, : len(written[index].ids)] = written[index].weights
        kinds = np.full(len(written), int(CandidateKind.DETERMINISTIC), np.uint8)
        kinds[sampled] = int(CandidateKind.SAMPLED)
        tensors = TreeTensors(
            np.array([token.token_id for token in written], np.int32),
            np.arange(len(written), dtype=np.int16) - 1,  # the first one is below the root
            kinds,
            np.array(sampled, np.int16) - 1,
            ids,
            weights,
        )
        return to_draft_tree(tensors, torch.zeros(1, dtype=torch.long)).sequence_tree()


def sampled_token(
    ids: np.ndarray, probs: np.ndarray, random: np.random.Generator
) -> ProvisionalToken:
    """Return a token from the `SUPPORT` most likely tokens of a distribution.

    The distribution is rounded to integers before the token is sampled.
    """
    best = np.argsort(-probs, kind="stable")[:SUPPORT]
    best = best[probs[best] > 0]
    weights = quantized(probs[best].astype(np.float64))
    (column,) = sample_columns(weights, 1, random)
    own = ids[best]
    return ProvisionalToken(int(own[column]), tuple(own.tolist()), tuple(weights.tolist()))
