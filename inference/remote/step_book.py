"""The steps of one session on the server: each is decided once, however often it is submitted.

A reply may be lost, and the loss may depend on its length. If the step were then decided again for
another tree, or with other random numbers, the text would not follow the target's distribution.
A submitted tree is therefore binding, and its verdict is kept until the next step is decided.
"""

from typing import NamedTuple

from inference.remote.errors import SessionGone, StepConflict


class StoredVerdict(NamedTuple):
    """The verdict of the last decided step."""

    step: int
    digest: str
    body: bytes


class StepBook:
    """The record of a session's steps, without any input or output; not thread-safe."""

    def __init__(self, next_step: int = 1) -> None:
        self.next_step = next_step
        self.is_finished = False  # whether the text is complete
        self.is_gone = False  # whether the session was closed
        self.last: StoredVerdict | None = None
        self.num_replays = 0

    def submit(self, step: int, digest: str) -> bool:
        """Return whether a submitted tree must be verified; otherwise, its verdict is `last`.

        Raises:
            StepConflict: another tree was submitted for this step, or this is neither the next step
                nor the last one.
            SessionGone: the session was closed.
        """
        if self.is_gone:
            raise SessionGone
        if self.last is not None and step == self.last.step:
            if digest != self.last.digest:
                raise StepConflict("step_conflict", step, self.next_step)
            self.num_replays += 1
            return False
        if step != self.next_step:
            raise StepConflict("out_of_order", step, self.next_step)
        if self.is_finished:
            raise StepConflict("session_finished", step, self.next_step)
        return True

    def store(self, digest: str, verdict: bytes, is_finished: bool = False) -> None:
        """Keep the verdict of the next step's tree, before it is sent."""
        self.last = StoredVerdict(self.next_step, digest, verdict)
        self.next_step += 1
        self.is_finished = is_finished

    def close(self) -> None:
        """End the session; all that is submitted later is refused."""
        self.is_gone = True
        self.last = None
