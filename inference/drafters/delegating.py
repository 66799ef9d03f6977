"""Wrappers of drafters and sessions, which pass all calls on unless a subclass overrides them."""

from collections.abc import Sequence

from jaxtyping import Int
from torch import Tensor

from inference.draft_tree import DraftTree
from inference.protocol import (
    AdaptiveDrafter,
    AdaptiveSession,
    Budget,
    Committed,
    Drafter,
    DraftSession,
    EncodedMemory,
    VerifyResult,
    request_counter_of,
)
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import StepRandom
from jakiro.target.step import StepOutput


class DelegatingDrafter(AdaptiveDrafter):
    """A drafter that passes all calls on to a wrapped drafter, unless a subclass overrides them."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter = drafter
        self.needs = drafter.needs
        self.hidden_states = drafter.hidden_states
        self.version = drafter.version
        self.bytes_per_token = drafter.bytes_per_token
        self.proposer_names = drafter.proposer_names
        self.request_counter = request_counter_of(drafter)

    def __repr__(self) -> str:
        """Return a line with the wrapped drafter and the limits of the trees."""
        sizes = f"max_nodes={self.max_nodes}, max_depth={self.max_depth}"
        return f"{type(self).__name__}({self.drafter!r}, {sizes})"

    @property
    def max_nodes(self) -> int:
        """The largest number of nodes in a tree."""
        return self.drafter.max_nodes

    @property
    def max_depth(self) -> int:
        """The length of the longest path in a tree."""
        return self.drafter.max_depth

    def new_session(self, sampling: Sampling, capacity: int, batch: int = 1) -> DraftSession:
        """Return a session of the wrapped drafter."""
        return self.drafter.new_session(sampling, capacity, batch)

    def can_share(self, one: Sampling, other: Sampling) -> bool:
        """Return whether both can be in the same session of the wrapped drafter."""
        return self.drafter.can_share(one, other)

    def encode_memory(
        self, output: StepOutput, queries: Int[Tensor, "batch queries"] | None = None
    ) -> EncodedMemory:
        """Return the memory of tokens, encoded by the wrapped drafter."""
        return self.drafter.encode_memory(output, queries)

    def reset(self) -> None:
        """Reset the wrapped drafter if the wrapped drafter learns from requests."""
        if isinstance(self.drafter, AdaptiveDrafter):
            self.drafter.reset()


class DelegatingSession(AdaptiveSession):
    """A session that passes all calls on to a wrapped session, unless a subclass overrides them."""

    def __init__(self, session: DraftSession) -> None:
        self.session = session
        self.appends_copies = session.appends_copies

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of verified tokens added so far, for each sequence."""
        return self.session.lengths

    @property
    def is_sampled(self) -> bool:
        """Whether the wrapped session samples its candidates."""
        return self.session.is_sampled

    def advance(self, committed: Committed) -> None:
        """Add the newly verified tokens and the roots to the wrapped session."""
        self.session.advance(committed)

    def propose(self, budget: Budget, random: StepRandom) -> DraftTree:
        """Return the trees of the wrapped session."""
        return self.session.propose(budget, random)

    def on_verified(self, result: VerifyResult) -> None:
        """Pass the result of a verification to the wrapped session if that session is adaptive."""
        if isinstance(self.session, AdaptiveSession):
            self.session.on_verified(result)

    def on_finished(self, index: int, token_ids: Sequence[int]) -> None:
        """Pass a complete sequence to the wrapped session if the wrapped session is adaptive."""
        if isinstance(self.session, AdaptiveSession):
            self.session.on_finished(index, token_ids)

    def rollback(self, length: int) -> None:
        """Discard everything from position `length` on in the wrapped session."""
        self.session.rollback(length)

    def select_sequences(self, indices: Sequence[int]) -> None:
        """Keep only the sequences at these batch indices in the wrapped session."""
        self.session.select_sequences(indices)

    def append_sequences(self, other: DraftSession) -> None:
        """Add the sequences of another session to the wrapped session."""
        assert isinstance(other, DelegatingSession)
        self.session.append_sequences(other.session)

    def set_sampling(self, sampling: Sampling) -> None:
        """Prepare the wrapped session for a new request."""
        self.session.set_sampling(sampling)

    def reserve(self, capacity: int) -> None:
        """Make room for sequences of up to `capacity` tokens in the wrapped session."""
        self.session.reserve(capacity)

    def clear_unused(self) -> None:
        """Overwrite with zeros the memory of sequences that have left the wrapped session."""
        self.session.clear_unused()

    def close(self) -> None:
        """Close the wrapped session."""
        self.session.close()
