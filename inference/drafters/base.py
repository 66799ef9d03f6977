"""The session of drafters that know of a sequence nothing but its tokens."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor

from inference.draft_tree import ROOT, DraftTree
from inference.drafters.candidates import Candidates, deterministic_tree
from inference.protocol import Budget, Committed, EncodedMemory, RequestCounter, VerifyResult
from inference.sampling import Sampling
from jakiro.target.adapter import StepOutput

Tokens = Int64[np.ndarray, " tokens"]


@runtime_checkable
class Guesser(Protocol):
    """Guesses how one sequence goes on."""

    def begin(self) -> bool:
        """Begin another request; return whether what was read is forgotten, to be read again."""
        ...

    def read(self, token_ids: Tokens, num_known: int) -> None:
        """Take in a sequence that has grown; its first `num_known` tokens were read before."""
        ...

    def guess(self, token_ids: Tokens, num_nodes: int, depth: int) -> Candidates:
        """Return continuations, at most `num_nodes` candidates and `depth` tokens long."""
        ...

    @property
    def reads_logits(self) -> bool:
        """Whether it wants to see the target's logits."""
        ...

    def read_logits(self, token_ids: Tokens, logits: Float[Tensor, "laws vocab"]) -> None:
        """Take in the target's raw logits after each of the last tokens."""
        ...


class TokenSession:
    """Tokens of sequences that are decoded together, and who guesses how each goes on.

    Args:
        guessers: of each sequence; several may be the same.
        limits: of every tree.
        capacity: tokens of the longest sequence.
    """

    bytes_per_token = 8

    def __init__(self, guessers: Sequence[Guesser], limits: Budget, capacity: int) -> None:
        self.guessers = list(guessers)
        self.limits = limits
        self.lengths = (0,) * len(self.guessers)
        self._tokens = np.zeros((len(self.guessers), capacity + 1), np.int64)
        self._num_read = [0] * len(self.guessers)
        self._device: torch.device | None = None  # known once there are roots
        self._proposed: list[Candidates] = []
        self._step_id = 0

    def advance(self, committed: Committed) -> None:
        """Take in newly verified tokens and the roots.

        Raises:
            ValueError: tokens are missing between the session and `committed`.
        """
        if self._device is not None and committed.base_length == self.lengths:
            return
        pairs = zip(committed.base_length, committed.num_verified, strict=True)
        starts = tuple(end - count for end, count in pairs)
        if starts != self.lengths:
            raise ValueError(f"session ends at {self.lengths}, the next tokens start at {starts}")
        # A context asks for room by its cache, whose capacity was rounded up.
        self.reserve(max(committed.base_length))
        verified, roots = committed.token_ids.tolist(), committed.root[:, 0].tolist()
        for place, (start, end) in enumerate(zip(starts, committed.base_length, strict=True)):
            self._tokens[place, start:end] = verified[place][: end - start]
            self._tokens[place, end] = roots[place]
        self.lengths, self._device = committed.base_length, committed.root.device
        for place, guesser in enumerate(self.guessers):
            guesser.read(self._known(place), self._num_read[place])
            self._num_read[place] = self.lengths[place] + 1

    def propose(self, budget: Budget, generators: Sequence[torch.Generator]) -> DraftTree:
        """Return trees below the roots, within the budget; nothing is drawn."""
        assert self._device is not None, "advance before propose"
        self._step_id += 1
        num_nodes = min(budget.num_nodes, self.limits.num_nodes)
        depths = [one.depth for one in (budget, self.limits) if one.depth is not None]
        if num_nodes < 1 or min(depths) < 1:
            self._proposed = [Candidates.none()] * len(self.guessers)
        else:
            self._proposed = [
                guesser.guess(self._known(place), num_nodes, min(depths))
                for place, guesser in enumerate(self.guessers)
            ]
        base_length = torch.tensor(self.lengths, device=self._device)
        return deterministic_tree(self._proposed, base_length, self._step_id)

    def on_verified(self, result: VerifyResult) -> None:
        """Show the target's logits along each accepted path to those who learn from them."""
        if result.base_length != list(self.lengths) or not self._proposed:
            return  # a plain step, of which the session is told later
        for place, proposed in enumerate(self._proposed):
            path = result.path[place]
            accepted = proposed.token_ids[path].tolist()
            self.learn(place, accepted, partial(result.logits, place, [ROOT, *path]))

    def guess(self, place: int, path: Sequence[int], num_nodes: int, depth: int) -> Candidates:
        """Return continuations of a sequence after its root and a path below it."""
        longest = depth if self.limits.depth is None else min(depth, self.limits.depth)
        if min(num_nodes, longest) < 1:
            return Candidates.none()
        context = np.concatenate((self._known(place), np.array(path, np.int64)))
        return self.guessers[place].guess(context, num_nodes, longest)

    def learn(
        self,
        place: int,
        accepted: Sequence[int],
        logits: Callable[[], Float[Tensor, "laws vocab"]],
    ) -> None:
        """Show a sequence's guesser the target's logits, if it learns from them.

        Args:
            place: of the sequence.
            accepted: tokens after the root.
            logits: after the root and each of them.
        """
        if self.guessers[place].reads_logits:
            context = np.concatenate((self._known(place), np.array(accepted, np.int64)))
            self.guessers[place].read_logits(context, logits())

    def on_finished(self, place: int, token_ids: Sequence[int]) -> None:
        """Let a sequence's guesser read what has come since it last did."""
        known = np.array(token_ids, np.int64)
        if len(known) > self._num_read[place]:
            self.guessers[place].read(known, self._num_read[place])
            self._num_read[place] = len(known)

    def rollback(self, length: int) -> None:
        """Forget the tokens from position `length` on; what was learnt from them stays."""
        self.lengths = tuple(min(length, one) for one in self.lengths)
        self._num_read = [min(length, one) for one in self._num_read]
        self._device = None

    def select_sequences(self, places: Sequence[int]) -> None:
        """Forget all sequences but those at these places, which are ascending."""
        self.guessers = [self.guessers[place] for place in places]
        self.lengths = tuple(self.lengths[place] for place in places)
        self._num_read = [self._num_read[place] for place in places]
        self._tokens = self._tokens[list(places)]
        self._proposed = []

    def set_sampling(self, sampling: Sampling) -> None:
        """Begin another request; what is chosen does not depend on how tokens are drawn."""
        for place, guesser in enumerate(self.guessers):
            if guesser.begin():
                self._num_read[place] = 0

    def reserve(self, capacity: int) -> None:
        """Make room for sequences of up to `capacity` tokens."""
        width = self._tokens.shape[1]
        if capacity >= width:
            more = max(capacity + 1, 2 * width) - width
            self._tokens = np.pad(self._tokens, ((0, 0), (0, more)))

    def close(self) -> None:
        """Free the tokens."""
        self._tokens = self._tokens[:, :0]

    def _known(self, place: int) -> Tokens:
        """Return the tokens of a sequence, its root last."""
        return self._tokens[place, : self.lengths[place] + 1]


class WithoutMemory:
    """A drafter that needs nothing of the target's state, and learns nothing from requests."""

    needs: frozenset[str] = frozenset()
    hidden_states: tuple[int, ...] = ()
    request_counter: RequestCounter | None = None

    def encode_memory(
        self, output: StepOutput, rows: Int[Tensor, "batch rows"] | None = None
    ) -> EncodedMemory:
        """Never asked, because `needs` is empty.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"{type(self).__name__} reads tokens alone and has no memory")

    def reset(self) -> None:
        """Forget what was learnt from requests: nothing."""
