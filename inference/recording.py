"""Watches a drafter at work: which ranks and depths of its trees were accepted."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from inference.draft_tree import DraftTree
from inference.protocol import Budget, Committed, Drafter, DraftSession, MemoryRows, VerifyResult
from inference.sampling import Sampling
from jakiro.target import StepOutput


@dataclass(frozen=True)
class RoundRecord:
    """One verified tree: how many candidates outrank each accepted node, from depth 1 down."""

    ranks: list[int]


class RecordingDrafter:
    """Drafts as another drafter does and keeps a record of every round.

    Args:
        drafter: does the work; its trees must be deterministic.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.needs = drafter.needs
        self.hidden_states = drafter.hidden_states
        self.version = drafter.version
        self.turns = drafter.turns
        self.bytes_per_token = drafter.bytes_per_token
        self.max_nodes = drafter.max_nodes
        self.max_depth = drafter.max_depth
        self.records: list[RoundRecord] = []

    def open(self, sampling: Sampling, capacity: int, batch: int = 1) -> "RecordingSession":
        """Return a recorded session."""
        return RecordingSession(self.drafter.open(sampling, capacity, batch), self.records)

    def reset(self) -> None:
        """Pass on; the records stay."""
        self.drafter.reset()

    def encode(
        self, output: StepOutput, rows: Int[Tensor, "batch rows"] | None = None
    ) -> MemoryRows:
        """Encode as the recorded drafter does."""
        return self.drafter.encode(output, rows)


class RecordingSession:
    """A session that notes, at each feedback, what became of its last tree."""

    def __init__(self, session: DraftSession, records: list[RoundRecord]) -> None:
        self.session = session
        self.records = records
        self.tree: DraftTree | None = None

    def advance(self, committed: Committed) -> None:
        """Pass on."""
        self.session.advance(committed)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the recorded session."""
        return self.session.lengths

    def propose(self, budget: Budget, generators: Sequence[torch.Generator]) -> DraftTree:
        """Pass on, and keep the tree."""
        self.tree = self.session.propose(budget, generators)
        return self.tree

    def feedback(self, result: VerifyResult) -> None:
        """Record the accepted nodes' ranks by score, and pass on."""
        if self.tree is not None:
            row = self.tree.row()
            emitted = [*(row.token_ids[node] for node in result.path[0]), result.next_token[0]]
            self.records.append(RoundRecord([row.rank[node] for node in row.follow(emitted)]))
        self.session.feedback(result)

    def conclude(self, place: int, token_ids: Sequence[int]) -> None:
        """Pass on."""
        self.session.conclude(place, token_ids)

    def rollback(self, length: int) -> None:
        """Pass on."""
        self.session.rollback(length)

    def keep(self, places: Sequence[int]) -> None:
        """Pass on."""
        self.session.keep(places)

    def adopt(self, sampling: Sampling) -> None:
        """Pass on."""
        self.session.adopt(sampling)

    def reserve(self, capacity: int) -> None:
        """Pass on."""
        self.session.reserve(capacity)

    def close(self) -> None:
        """Pass on."""
        self.session.close()
