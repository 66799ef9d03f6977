"""What the engine asks of anything that drafts, and what it tells it in return."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import NamedTuple, Protocol, runtime_checkable
from weakref import WeakSet

import torch
from jaxtyping import Float, Int
from torch import Tensor

from inference.draft_tree import DraftTree
from inference.sampling import Sampling
from jakiro.target.adapter import StepOutput


class RequestCounter:
    """Counts the requests that teach something, from 0; threads may share it.

    Attributes:
        num_resets: how often what they have taught was forgotten.
    """

    def __init__(self) -> None:
        self.num_resets = 0
        self._next = 0
        self._under_way: WeakSet[RequestTicket] = WeakSet()
        # A run that is garbage ends its turn wherever the collector comes, even in `take`.
        self._lock = RLock()

    def take(self) -> "RequestTicket":
        """Return the turn of a request, whose number no other one gets until `reset`."""
        with self._lock:
            ticket = RequestTicket(self, self._next)
            self._under_way.add(ticket)
            self._next += 1
            return ticket

    def reset(self) -> None:
        """Begin with 0 again, once what was learnt is forgotten.

        While requests are under way, which go on to teach, numbers go on, too.
        """
        with self._lock:
            self.num_resets += 1
            if not self._under_way:
                self._next = 0

    def end(self, ticket: "RequestTicket") -> None:
        """Take note that a request teaches nothing any more."""
        with self._lock:
            self._under_way.discard(ticket)


class RequestTicket:
    """What a request, or several that are decoded together, hold while they may teach something.

    Args:
        turns: that count it.
        number: which one it is.
    """

    def __init__(self, counter: RequestCounter, number: int) -> None:
        self.number = number
        self._counter = counter

    def end(self) -> None:
        """Teach nothing any more; a turn that is held by nothing has ended, too."""
        self._counter.end(self)


class Budget(NamedTuple):
    """Limits of one tree."""

    num_nodes: int
    depth: int | None = None  # longest path; None: as the drafter likes


class EncodedMemory(NamedTuple):
    """What a drafter keeps of verified tokens, such as cross-attention rows; padded alike."""

    tensors: tuple[Float[Tensor, "batch _ verified _"], ...]
    encoder_version: str


class Committed(NamedTuple):
    """Tokens that have become final: verified ones, whose rows are in the cache, then the root.

    Sequence b has its root at position `base_length[b]` and `num_verified[b]` verified tokens just
    before it; they stand at the left of `token_ids`, and what follows them there is padding.
    """

    base_length: tuple[int, ...]
    num_verified: tuple[int, ...]
    token_ids: Int[Tensor, "batch verified"]
    root: Int[Tensor, "batch 1"]
    memory: EncodedMemory | None  # of the verified tokens; None for drafters that need none


@dataclass(frozen=True)
class VerifyResult:
    """What verification made of a tree; it teaches drafters that learn, and changes no state."""

    step_id: int
    base_length: list[int]  # position of each root
    path: list[list[int]]  # accepted nodes of each sequence, as far as it was emitted
    num_accepted: list[int]
    next_token: list[int]  # the last that was emitted: drafted, where a sequence ended before
    finished: list[bool]
    target_probs: Callable[
        [int, int], Float[Tensor, " vocab"]
    ]  # (sequence, visited node) -> target's law
    # (sequence, nodes) -> the target's own logits after them, before any processor
    logits: Callable[[int, Sequence[int]], Float[Tensor, "nodes vocab"]]


@runtime_checkable
class DraftSession(Protocol):
    """The drafting state of some sequences that are decoded together.

    When it proposes: length of memory == number of cached tokens == position of the root.
    """

    @property
    def lengths(self) -> tuple[int, ...]:
        """Verified tokens taken in so far, per sequence."""
        ...

    def advance(self, committed: Committed) -> None:
        """Take in final tokens. Telling the same `base_length` again changes nothing."""
        ...

    def propose(self, budget: Budget, generators: Sequence[torch.Generator]) -> DraftTree:
        """Return trees below the roots, within the budget; each sequence draws from its own."""
        ...

    def on_verified(self, result: VerifyResult) -> None:
        """Learn from a verification, or ignore it."""
        ...

    def on_finished(self, index: int, token_ids: Sequence[int]) -> None:
        """Learn from a sequence that is complete, or ignore it; its state stays as it is.

        Args:
            place: of the sequence.
            token_ids: prompt and all that was emitted.
        """
        ...

    def rollback(self, length: int) -> None:
        """Forget everything from position `length` on."""
        ...

    def select_sequences(self, indices: Sequence[int]) -> None:
        """Forget all sequences but those at these places, which are ascending."""
        ...

    def set_sampling(self, sampling: Sampling) -> None:
        """Draft for another way of sampling from now on."""
        ...

    def reserve(self, capacity: int) -> None:
        """Make room for sequences of up to `capacity` tokens."""
        ...

    def close(self) -> None:
        """Free the session's memory."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """Weights or tables that sessions share; holds no request's state."""

    @property
    def needs(self) -> frozenset[str]:
        """What must come with `Committed`: {"memory"}, or nothing."""
        ...

    @property
    def hidden_states(self) -> tuple[int, ...]:
        """Which of the target's hidden states the cache must keep for `encode`."""
        ...

    @property
    def version(self) -> str:
        """Identifies what encodes memory, so that rows of another encoder are refused."""
        ...

    @property
    def max_nodes(self) -> int:
        """The most nodes that a tree can have."""
        ...

    @property
    def max_depth(self) -> int:
        """The longest path that a tree can have."""
        ...

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a session takes for each token of a sequence."""
        ...

    @property
    def request_counter(self) -> RequestCounter | None:
        """Numbers the requests that it learns from for later ones; None: it learns nothing so.

        What was learnt depends on the random numbers that decided it. A later request must not be
        decided by the same ones, or its law would depend on what is drafted.
        """
        ...

    def new_session(self, sampling: Sampling, capacity: int, batch: int = 1) -> DraftSession:
        """Return a session for sequences of up to `capacity` tokens."""
        ...

    def reset(self) -> None:
        """Forget what was learnt from requests, if anything was."""
        ...

    def encode_memory(
        self, output: StepOutput, rows: Int[Tensor, "batch rows"] | None = None
    ) -> EncodedMemory:
        """Return memory of the tokens at query indices `rows` (None: all) of what was read.

        Asked only of drafters that need memory. It lives with the target.
        """
        ...
