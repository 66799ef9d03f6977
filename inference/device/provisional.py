"""Text that the drafter writes while no verdict arrives.

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

from inference.device.drafting import DeviceDrafting
from inference.draft_tree import ROOT, CandidateKind, SequenceTree
from inference.drafters.base import TokenSession
from inference.drafters.trained.chain import TrainedChain
from inference.drafters.trained.drafter import TrainedSession
from inference.protocol import Budget
from inference.remote.received_tree import to_draft_tree
from inference.remote.tree_frame import TreeTensors, integer_distribution
from inference.sampling.random_numbers import StepRandom, StreamKey

_ALONE = 2  # stream of random numbers, besides those that accept and draft in a decoding step


class ProvisionalToken(NamedTuple):
    """A token that was written alone, with the distribution that it was sampled from."""

    token_id: int
    ids: tuple[int, ...] = ()  # empty if the token was selected without sampling
    weights: tuple[int, ...] = ()  # integer weights of these ids

    @classmethod
    def of(cls, tree: SequenceTree) -> "ProvisionalToken | None":
        """Return the only candidate of a tree; None if there is none."""
        if not tree.children:
            return None
        token_id = tree.token_ids[tree.children[ROOT][0]]
        if not tree.sampled:
            return cls(token_id)
        ids, weights = integer_distribution(tree, ROOT)
        return cls(token_id, tuple(ids[weights > 0].tolist()), tuple(weights[weights > 0].tolist()))


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
        kinds = np.full(len(written), int(CandidateKind.DETERMINISTIC), np.uint8)
        kinds[sampled] = int(CandidateKind.SAMPLED)
        tensors = TreeTensors(
            np.array([token.token_id for token in written], np.int32),
            np.arange(len(written), dtype=np.int16) - 1,  # the first one is below the root
            kinds,
            np.array(sampled, np.int16) - 1,
            _padded([written[index].ids for index in sampled]).astype(np.int32),
            _padded([written[index].weights for index in sampled]).astype(np.uint16),
        )
        return to_draft_tree(tensors, torch.zeros(1, dtype=torch.long)).sequence_tree()


class AloneWriter:
    """Provisional tokens after verified ones, from the session of the drafter.

    Args:
        attempt: number of times that this text has been continued alone, including this time.
        most: largest number of tokens.
    """

    @torch.inference_mode()
    def __init__(
        self,
        drafting: DeviceDrafting,
        token_ids: Sequence[int],
        step: int,
        attempt: int,
        most: int,
    ) -> None:
        self._drafting = drafting
        self._verified = list(token_ids)
        self._step_key = drafting.sampling.stream_key(step)
        self._attempt = attempt
        self._count = 0
        self._chain: TrainedChain | None = None
        self._unread: list[int] = []  # verified tokens after the root of the chain
        if not isinstance(drafting.session, TrainedSession):
            drafting.advance(self._verified)
            return
        # The path begins at the last token before which all memory is here. If this token is far
        # back, as without the memory of the prompt, the drafter would write nonsense.
        root = drafting.num_readable
        self._unread = self._verified[root + 1 :]
        if root > 0 and len(self._unread) <= drafting.limits.largest:
            drafting.advance(self._verified[: root + 1])
            self._chain = TrainedChain(drafting.session, len(self._unread) + most)

    @torch.inference_mode()
    def next(self, provisional: Sequence[int]) -> ProvisionalToken | None:
        """Return a token after provisional ones; None if the drafter has none."""
        session = self._drafting.session
        if session is None:
            return None
        if isinstance(session, TokenSession):  # which must not learn from provisional text
            token_ids = session.draft_below(0, provisional, 1, 1).token_ids
            return ProvisionalToken(int(token_ids[0])) if len(token_ids) else None
        self._count += 1
        key = alone_key(self._step_key, self._attempt, self._count)
        random = StepRandom([key], self._drafting.device)
        if not isinstance(session, TrainedSession):
            self._drafting.advance([*self._verified, *provisional])
            return ProvisionalToken.of(session.propose(Budget(1, 1), random).sequence_tree())
        if self._chain is None:
            return None
        tree = self._chain.propose([*self._unread, *provisional], random).sequence_tree()
        token = ProvisionalToken.of(tree)
        if token is None:
            self._chain = None  # it cannot be asked twice about the same tokens
        return token

    def stop(self) -> None:
        """Let the drafter forget the provisional tokens, as far as it has stored them."""
        self._drafting.rollback(len(self._verified) - 1)


def alone_key(step_key: StreamKey, attempt: int, number: int) -> StreamKey:
    """Return the key of the random numbers of a provisional token, which nothing else uses.

    Whether earlier provisional tokens were kept depends on their random numbers, so these numbers
    must not select other candidates.

    Args:
        attempt: number of times that the device has begun to write alone in this text.
    """
    return (*step_key, _ALONE, attempt, number)


def _padded(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Return rows of equal lengths, filled up with zeros."""
    width = max(map(len, rows), default=0)
    padded = [[*row, *[0] * (width - len(row))] for row in rows]
    return np.array(padded).reshape(len(rows), width)
