"""The steps of one session on the server: each is decided once, however often it is submitted.

A reply may be lost, and the loss may depend on its length. If the step were then decided again for
another tree, or with other random numbers, the text would not follow the target's distribution.
A submitted tree is therefore binding, and its verdict is kept until the next step is decided.

    expects n --submit n--> decides n --store--> expects n + 1
                            decides n --withdraw--> expects n     (the tree could not be verified)
"""

from enum import Enum, auto
from typing import NamedTuple

from inference.remote.errors import SessionGone, StepConflict


class Decision(Enum):
    """The work to do for a submitted step."""

    DECIDE = auto()  # verify the tree, and store the verdict
    WAIT = auto()  # the same tree is being verified; its verdict will be stored
    REPLAY = auto()  # the verdict is stored


class StoredVerdict(NamedTuple):
    """The verdict of the last decided step."""

    step: int
    digest: str
    body: bytes


class StepBook:
    """The record of a session's steps, without any input or output; not thread-safe.

    Args:
        next_step: number of the first step.
    """

    def __init__(self, next_step: int = 1) -> None:
        self.next_step = next_step
        self.is_finished = False  # whether the text is complete
        self.is_gone = False  # whether the session was closed
        self.last: StoredVerdict | None = None
        self.num_replays = 0
        self._digest: str | None = None  # digest of the tree that is being verified

    def submit(self, step: int, digest: str) -> Decision:
        """Return the work to do for a submitted step.

        Args:
            step: number of the step.
            digest: digest of the tree.

        Raises:
            StepConflict: another tree was submitted for this step, or this is neither the next step
                nor the last one.
            SessionGone: the session was closed.
        """
        if self.is_gone:
            raise SessionGone
        if self.last is not None and step == self.last.step:
            self._check_same(step, digest, self.last.digest)
            self.num_replays += 1
            return Decision.REPLAY
        if step != self.next_step:
            raise StepConflict("out_of_order", step, self.next_step)
        if self.is_finished:
            raise StepConflict("session_finished", step, self.next_step)
        if self._digest is not None:
            self._check_same(step, digest, self._digest)
            return Decision.WAIT
        self._digest = digest
        return Decision.DECIDE

    def store(self, verdict: bytes, is_finished: bool = False) -> None:
        """Keep the verdict of the tree that was being verified, before it is sent.

        Args:
            verdict: message for the device.
            is_finished: whether the text is complete.
        """
        assert self._digest is not None, "submit before store"
        self.last = StoredVerdict(self.next_step, self._digest, verdict)
        self.next_step += 1
        self.is_finished = is_finished
        self._digest = None

    def withdraw(self) -> None:
        """Free the step whose tree could not be verified, so that another tree can be submitted.

        This is exact only if nothing was decided.
        """
        self._digest = None

    def close(self) -> None:
        """End the session; all that is submitted later is refused."""
        self.is_gone = True
        self.last = self._digest = None

    def _check_same(self, step: int, digest: str, known: str) -> None:
        if digest != known:
            raise StepConflict("step_conflict", step, self.next_step)
