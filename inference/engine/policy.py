"""Draft policies, which decide how much to draft in each step, and a policy with fixed limits."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

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


@runtime_checkable
class StepPolicy(Protocol):
    """The draft policy of one run."""

    @property
    def autoregressive_seconds(self) -> float | None:
        """The estimated seconds of a decoding step without drafts; None if unknown."""
        ...

    @property
    def threads(self) -> int | None:
        """The number of threads of the next step on a CPU; None for that of the decoder."""
        ...

    def next_budget(self, progress: RunProgress) -> Budget | None:
        """Return the limits of the next trees, or None for a step without drafts."""
        ...

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
        ...


@runtime_checkable
class DraftPolicy(Protocol):
    """The draft policy of a decoder, shared by all runs of this decoder."""

    @property
    def request_counter(self) -> RequestCounter | None:
        """The counter that numbers the requests to learn from; None if nothing is learned."""
        ...

    def new_run(self, sampling: Sampling, batch: int) -> StepPolicy:
        """Return the policy of a run over `batch` sequences."""
        ...

    def reset(self) -> None: ...


class AlwaysDraft:
    """Policy that drafts at every decoding step, with the same limits."""

    request_counter: RequestCounter | None = None

    autoregressive_seconds: float | None = None

    threads: int | None = None

    def __init__(self, budget: Budget | None) -> None:
        self.budget = budget

    @classmethod
    def with_all_of(cls, drafter: Drafter | None) -> "AlwaysDraft":
        """Return a policy that drafts as much as the drafter allows."""
        return cls(None if drafter is None else Budget(drafter.max_nodes))

    def new_run(self, sampling: Sampling, batch: int) -> "AlwaysDraft":
        """Return the policy itself, because nothing is learned."""
        return self

    def reset(self) -> None:
        """Do nothing, because nothing was learned."""

    def next_budget(self, progress: RunProgress) -> Budget | None:
        """Return the limits of every tree; None to decode without drafts."""
        return self.budget

    def learn(
        self,
        trees: Sequence[SequenceTree],
        paths: Sequence[list[int]],
        seconds: float | None,
        budget: Budget | None,
    ) -> None:
        """Learn nothing."""
