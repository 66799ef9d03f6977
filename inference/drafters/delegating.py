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
    request_counter_of,
)
from inference.sampling.grammar import GrammarProcessor
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

    @property
    def max_nodes(self) -> int:
        return self.drafter.max_nodes

    @property
    def max_depth(self) -> int:
        return self.drafter.max_depth

    def new_session(self, sampling: Sampling, capacity: int, batch: int = 1) -> DraftSession:
        return self.drafter.new_session(sampling, capacity, batch)

    def can_share(self, one: Sampling, other: Sampling) -> bool:
        return self.drafter.can_share(one, other)

    def encode_memory(
        self, output: StepOutput, queries: Int[Tensor, "batch queries"] | None = None
    ) -> EncodedMemory:
        return self.drafter.encode_memory(output, queries)

    def reset(self) -> None:
        if isinstance(self.drafter, AdaptiveDrafter):
            self.drafter.reset()


class DelegatingSession(AdaptiveSession):
    """A session that passes all calls on to a wrapped session, unless a subclass overrides them."""

    def __init__(self, session: DraftSession) -> None:
        self.session = session
        self.appends_copies = session.appends_copies

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.session.lengths

    @property
    def is_sampled(self) -> bool:
        return self.session.is_sampled

    def advance(self, committed: Committed) -> None:
        self.session.advance(committed)

    def propose(self, budget: Budget, random: StepRandom) -> DraftTree:
        return self.session.propose(budget, random)

    def on_finished(self, index: int, token_ids: Sequence[int]) -> None:
        if isinstance(self.session, AdaptiveSession):
            self.session.on_finished(index, token_ids)

    def rollback(self, length: int) -> None:
        self.session.rollback(length)

    def select_sequences(self, indices: Sequence[int]) -> None:
        self.session.select_sequences(indices)

    def append_sequences(self, other: DraftSession) -> None:
        assert isinstance(other, DelegatingSession)
        self.session.append_sequences(other.session)

    def set_sampling(self, sampling: Sampling) -> None:
        self.session.set_sampling(sampling)

    def constrain(self, grammars: Sequence[GrammarProcessor | None]) -> None:
        self.session.constrain(grammars)

    def reserve(self, capacity: int) -> None:
        self.session.reserve(capacity)

    def close(self) -> None:
        self.session.close()
