"""A drafter that takes time, so that there is time to look at streams and to stop them."""

import time

from inference.draft_tree import DraftTree
from inference.drafters.delegating import DelegatingDrafter, DelegatingSession
from inference.protocol import Budget, DraftSession
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import StepRandom


class SlowDrafter(DelegatingDrafter):
    """A drafter that proposes the trees of another drafter after a delay."""

    seconds: float = 0.0

    def new_session(self, sampling: Sampling, capacity: int, batch: int = 1) -> DraftSession:
        """Return a session of the wrapped drafter that takes time."""
        return _SlowSession(self, self.drafter.new_session(sampling, capacity, batch))


class _SlowSession(DelegatingSession):
    def __init__(self, drafter: SlowDrafter, session: DraftSession) -> None:
        super().__init__(session)
        self._drafter = drafter

    def propose(self, budget: Budget, random: StepRandom) -> DraftTree:
        time.sleep(self._drafter.seconds)
        return super().propose(budget, random)
