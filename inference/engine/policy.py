"""Draft policies, which decide how much to draft in each step, and a policy with fixed limits."""

from collections.abc import Sequence
from typing import NamedTuple

from inference.draft_tree import SequenceTree
from inference.protocol import Budget, Drafter, RequestCounter
from inference.sampling.options import Sampling


class RunProgress(NamedTuple):
    """The progress of a run before a decoding step.

    Attributes:
        unread: number of tokens, over all sequences, that the drafter has not read yet. It reads
            them before it drafts.
        left: largest number of tokens that a sequence may still get; None if unknown.
    """

    unread: int = 0
    left: int | None = None


class DraftPolicy:
    """Decides how much to draft, for a decoder (`new_run`) and in the steps of a run.

    Attributes:
        request_counter: numbers the requests to learn from; None if nothing is learned.
    """

    request_counter: RequestCounter | None = None

    def new_run(self, sampling: Sampling, batch: int) -> "DraftPolicy":
        return self

    def reproducible(self, places: int | None = None) -> "DraftPolicy":
        """Return a policy with trees that depend on nothing that is learned.

        Args:
            places: number of places of a lane, whose sequences come and go; None for a run.
        """
        return self

    def reset(self) -> None:
        """Forget what was learned."""

    @property
    def threads(self) -> int | None:
        """The number of threads of the next step on a CPU; None for that of the decoder."""
        return None

    def next_budget(self, progress: RunProgress) -> Budget | None:
        return None

    def learn(
        self,
        trees: Sequence[SequenceTree],
        paths: Sequence[list[int]],
        seconds: float | None,
        budget: Budget | None,
    ) -> None:
        """Learn from a decoding step.

        Args:
            budget: limits of its trees; None for a step without drafts. The limits of the next step
                may have been requested already.
        """


class AlwaysDraft(DraftPolicy):
    """Policy that drafts at every decoding step, with the same limits; without limits, never."""

    def __init__(self, budget: Budget | None) -> None:
        self.budget = budget

    @classmethod
    def with_all_of(cls, drafter: Drafter | None) -> "AlwaysDraft":
        return cls(None if drafter is None else Budget(drafter.max_nodes))

    def next_budget(self, progress: RunProgress) -> Budget | None:
        return self.budget
