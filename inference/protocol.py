"""The interface between the decode engine and drafters, and the records that they exchange."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from threading import RLock
from typing import NamedTuple
from weakref import WeakSet

import torch
from jaxtyping import Float, Int
from torch import Tensor

from inference.draft_tree import DraftTree
from inference.sampling.batch import BatchSampling
from inference.sampling.grammar import GrammarProcessor
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import StepRandom
from jakiro.target.step import StepOutput


class Budget(NamedTuple):
    num_nodes: int
    depth: int | None = None  # largest depth; None to leave it to the drafter


class EncodedMemory(NamedTuple):
    """A drafter's encoding of verified tokens; all tensors have an entry for every token."""

    tensors: tuple[Float[Tensor, "batch _ verified _"], ...]
    encoder_version: str


class Committed(NamedTuple):
    """Tokens that became final: verified tokens, which are in the target's cache, and a new root.

    The root of sequence b is at position `base_length[b]`, right after its `num_verified[b]`
    verified tokens. In `token_ids`, the verified tokens come first, followed by padding.
    """

    base_length: tuple[int, ...]
    num_verified: tuple[int, ...]
    token_ids: Int[Tensor, "batch verified"]
    root: Int[Tensor, "batch 1"]
    start: Int[Tensor, " batch"]  # position of the first verified token
    end: Int[Tensor, " batch"]  # `base_length` on the device
    is_padded: bool  # whether a sequence may have fewer verified tokens than there are columns
    # memory of the verified tokens; None if the drafter needs none
    memory: EncodedMemory | None = None

    @classmethod
    def of(
        cls,
        token_ids: Sequence[Sequence[int]],
        starts: Sequence[int],
        ends: Sequence[int],
        device: torch.device,
    ) -> "Committed":
        """Return the tokens of each sequence from `starts` to the roots, which are at `ends`."""

        def on_device(integers: Sequence[object]) -> Tensor:
            return torch.tensor(integers, device=device)

        counts = tuple(end - start for start, end in zip(starts, ends, strict=True))
        width = max(counts)
        spans = zip(token_ids, starts, ends, strict=True)
        return cls(
            base_length=tuple(ends),
            num_verified=counts,
            token_ids=on_device([[*ids[a:b], *[0] * (width - (b - a))] for ids, a, b in spans]),
            root=on_device([[ids[end]] for ids, end in zip(token_ids, ends, strict=True)]),
            start=on_device(starts),
            end=on_device(ends),
            is_padded=min(counts) < width,
        )

    @property
    def starts(self) -> tuple[int, ...]:
        """The position of each sequence's first verified token."""
        pairs = zip(self.base_length, self.num_verified, strict=True)
        return tuple(end - count for end, count in pairs)

    def starts_after(self, lengths: tuple[int, ...]) -> tuple[int, ...]:
        if self.starts != lengths:
            raise ValueError(
                f"the session ends at {lengths}, but the next tokens start at {self.starts}"
            )
        return lengths


class RequestCounter:
    """A thread-safe counter that numbers requests, for drafters that learn from requests.

    Args:
        first: first number. If a drafter keeps what it has learned when the process ends, the
            numbers of the next process must be others.
    """

    def __init__(self, first: int = 0) -> None:
        self.num_resets = 0
        self._first = self._next = first
        self._active: WeakSet[RequestTicket] = WeakSet()
        # The lock is reentrant, because the garbage collector may end a ticket at any time, even
        # while `take` holds the lock.
        self._lock = RLock()

    def take(self) -> "RequestTicket":
        """Return a ticket with the next number, which is unique until the numbers restart."""
        with self._lock:
            ticket = RequestTicket(self, self._next)
            self._active.add(ticket)
            self._next += 1
            return ticket

    def reset(self) -> None:
        """Restart the numbers; must be called after the learned knowledge was discarded.

        If requests are still active, the numbers continue instead, because the drafter still learns
        from these requests.
        """
        with self._lock:
            self.num_resets += 1
            if not self._active:
                self._next = self._first

    def end(self, ticket: "RequestTicket") -> None:
        with self._lock:
            self._active.discard(ticket)


def number_of(tickets: Sequence["RequestTicket"]) -> int:
    """Return one number for all tickets of a request, a different one for each combination.

    There are two tickets if both the drafter and the choice of trees learn from requests. The
    numbers of the two may differ, because drafter and trees may be reset separately.
    """
    first, *others = (ticket.number for ticket in tickets)
    for other in others:  # Cantor's pairing function
        first = (first + other) * (first + other + 1) // 2 + other
    return first


class RequestTicket:
    """The number of a request, or of a batch of requests, that a drafter is learning from."""

    def __init__(self, counter: RequestCounter, number: int) -> None:
        self.number = number
        self._counter = counter

    def end(self) -> None:
        """End the ticket; a ticket that is garbage-collected ends as well."""
        self._counter.end(self)


class DraftSession(ABC):
    """The drafting state of sequences that are decoded together.

    Before `propose` is called, all verified tokens must have been passed to `advance`. The length
    of every sequence in the session is then the number of the sequence's tokens in the target's
    cache, which is also the position of the sequence's root.

    Attributes:
        appends_copies: whether `append_sequences` copies the other session, so that the other
            session can be rolled back by a token and be appended again. Otherwise, each
            continuation of a prompt gets a session of its own, which processes the whole prompt.
    """

    appends_copies: bool = False

    @property
    @abstractmethod
    def lengths(self) -> tuple[int, ...]:
        """The number of verified tokens processed so far, per sequence."""

    @property
    def is_sampled(self) -> bool:
        """Whether candidates are sampled; sampled candidates must not be filtered afterwards."""
        return False

    @abstractmethod
    def advance(self, committed: Committed) -> None:
        """Process tokens that became final; repeating the last call has no effect."""

    @abstractmethod
    def propose(self, budget: Budget, random: StepRandom) -> DraftTree:
        """Return draft trees below the roots."""

    @abstractmethod
    def rollback(self, length: int) -> None:
        """Discard everything from position `length` on."""

    @abstractmethod
    def select_sequences(self, indices: Sequence[int]) -> None:
        """Keep only the sequences at these batch indices, in this order.

        Args:
            indices: one batch index for each sequence to keep. A sequence may move to a smaller
                index, the index of a sequence that is dropped, but never to a larger one.
        """

    def append_sequences(self, other: "DraftSession") -> None:
        """Add the sequences of another session of the same drafter after this session's own.

        All verified tokens must have been passed to both sessions. The other session cannot be used
        afterwards, unless `appends_copies` is true.
        """
        raise NotImplementedError(
            f"sessions cannot be joined, because {type(self).__name__} lacks append_sequences()"
        )

    def set_sampling(self, sampling: Sampling) -> None:
        """Prepare for another request, which may have different sampling options."""

    def constrain(self, grammars: Sequence[GrammarProcessor | None]) -> None:
        """Propose only candidates that these grammars, one for each sequence, allow.

        No grammars lift the constraint. A session that samples candidates from distributions should
        mask them before; of other sessions, forbidden candidates are removed from the trees.
        """

    def reserve(self, capacity: int) -> None:
        """Make room for sequences of up to `capacity` tokens."""

    def close(self) -> None:
        """Free the memory of the session."""


class DeviceSession(DraftSession):
    """A session that never waits for the device, so that whole decoding steps can be recorded.

    `advance` and `propose` may use numbers on the host only to choose the sizes of tensors, for
    which upper bounds of the lengths are enough.
    """

    @abstractmethod
    def show_rows(self, sampling: BatchSampling) -> None:
        """Switch to sequences with these options, whose lengths are 0 until `follow` is called.

        There is room for them, because the session had at least as many before. The last sequences
        may have no tokens: what a step computes for such a sequence is not used.
        """

    @abstractmethod
    def follow(
        self,
        lengths: tuple[int, ...],
        base_length: Int[Tensor, " batch"],
        root: Int[Tensor, "batch 1"],
    ) -> None:
        """Set the lengths and roots; the verified tokens up to these lengths must be cached.

        Args:
            lengths: number of verified tokens of each sequence, or an upper bound of it.
        """


class AdaptiveSession(DraftSession):
    """A session that learns from texts as a whole, besides what `advance` tells it."""

    @abstractmethod
    def on_finished(self, index: int, token_ids: Sequence[int]) -> None:
        """Learn from a complete sequence, which stays in the session."""


class Drafter(ABC):
    """A source of draft trees: weights or tables that all sessions share, without request state.

    Attributes:
        needs: optional fields of `Committed` that sessions need: {"memory"} or the empty set.
        hidden_states: indices of the target's hidden states that the target's cache keeps for
            `encode_memory`.
        version: identifier of the memory encoder; sessions reject memory from other encoders.
        bytes_per_token: number of bytes that a session takes for each token of a sequence.
        request_counter: counter that numbers the requests; None if nothing is learned from requests
            for later ones. See `AdaptiveDrafter`.
    """

    needs: frozenset[str] = frozenset()
    hidden_states: tuple[int, ...] = ()
    version: str = ""
    bytes_per_token: int = 0
    proposer_names: tuple[str, ...] = ("drafter",)
    request_counter: RequestCounter | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(max_nodes={self.max_nodes}, max_depth={self.max_depth})"

    @property
    @abstractmethod
    def max_nodes(self) -> int:
        """The largest number of nodes of a tree."""

    @property
    @abstractmethod
    def max_depth(self) -> int:
        """The largest depth of a tree."""

    @abstractmethod
    def new_session(self, sampling: Sampling, capacity: int, batch: int = 1) -> DraftSession:
        """Return a session for `batch` sequences of up to `capacity` tokens.

        Args:
            capacity: largest number of tokens of a sequence, including the root and a draft tree.
        """

    def can_share(self, one: Sampling, other: Sampling) -> bool:
        """Return whether sequences with these sampling options can be in the same session.

        By default, this is the case if their tokens are selected in the same way.
        """
        return one.description == other.description

    def encode_memory(
        self, output: StepOutput, queries: Int[Tensor, "batch queries"] | None = None
    ) -> EncodedMemory:
        """Return the encoded memory of tokens that the target has read.

        The engine calls this method only if `needs` contains "memory".
        """
        raise RuntimeError(f"{type(self).__name__} reads only tokens and has no memory")


class AdaptiveDrafter(Drafter):
    """A drafter that learns from requests; its sessions are `AdaptiveSession`s.

    What a drafter learns from a request depends on the random numbers of that request. If a later
    request accepted and rejected candidates by the same random numbers, these candidates would
    already depend on the numbers, and the output distribution would be wrong. Requests are
    therefore numbered, and the random numbers of a request depend on its number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.request_counter: RequestCounter | None = RequestCounter()

    def reset(self) -> None:
        """Discard what was learned from requests, and number later requests from 0."""
        if self.request_counter is not None:
            self.request_counter.reset()


def request_counter_of(drafter: Drafter | None) -> RequestCounter | None:
    """Return the counter of a drafter that learns from requests; None for other drafters."""
    return None if drafter is None else drafter.request_counter


class CostAware(Drafter):
    """A drafter with a slow part, which drafts only in steps in which it saves time."""

    @property
    @abstractmethod
    def slow_part(self) -> Drafter:
        """The part of the drafter that takes time."""

    @abstractmethod
    def use_costs(
        self, verify: Callable[[int], float], draft: Mapping[int, float]
    ) -> Callable[[], None]:
        """Let later sessions use the slow part by these costs, and by rates that they learn.

        Args:
            verify: function from the number of nodes of a tree to the seconds of its verification.
            draft: seconds of the slow part, by its number of passes.

        Returns:
            A function that discards the learned rates.
        """
