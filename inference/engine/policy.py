"""Decides before each round whether to draft, and how much."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from inference.draft_tree import TreeRow
from inference.protocol import Budget, Drafter, RequestCounter
from inference.sampling import Sampling


@runtime_checkable
class StepPolicy(Protocol):
    """The decisions of one run."""

    def next_budget(self) -> Budget | None:
        """Return the limits of the next round's trees, or None for a plain decoding step."""
        ...

    def learn(self, rows: Sequence[TreeRow], paths: Sequence[list[int]], seconds: float) -> None:
        """Take in what became of the last round.

        Args:
            rows: what was verified, per sequence.
            paths: accepted nodes of each sequence.
            seconds: that the round took.
        """
        ...


@runtime_checkable
class DraftPolicy(Protocol):
    """Whatever runs share: it hands out their policies."""

    @property
    def request_counter(self) -> RequestCounter | None:
        """Numbers the runs that it learns from for later ones; None: it learns nothing so."""
        ...

    def new_run(self, sampling: Sampling, batch: int) -> StepPolicy:
        """Return the policy of a run over `batch` sequences."""
        ...

    def reset(self) -> None:
        """Forget what was learnt from earlier runs."""
        ...


class AlwaysDraft:
    """Draft in every round, as much as the drafter has room for.

    Args:
        drafter: whose trees these are; None never drafts.
    """

    request_counter: RequestCounter | None = None

    def __init__(self, drafter: Drafter | None) -> None:
        self.budget = None if drafter is None else Budget(drafter.max_nodes)

    def new_run(self, sampling: Sampling, batch: int) -> "AlwaysDraft":
        """Return itself: nothing is learnt."""
        return self

    def reset(self) -> None:
        """Nothing was learnt."""

    def next_budget(self) -> Budget | None:
        """Return the drafter's own limits."""
        return self.budget

    def learn(self, rows: Sequence[TreeRow], paths: Sequence[list[int]], seconds: float) -> None:
        """Learn nothing."""
