"""The steps of one session on the server: each is decided once, however often it is submitted.

A reply may be lost, and the loss may depend on its length. If the step were then decided again for
another tree, or with other random numbers, the text would not follow the target's distribution.
A submitted tree is therefore binding, and its verdict is kept until the next step is decided.
"""

from typing import NamedTuple

from inference.remote.messages import MessageError

_CONFLICT = 409


class StoredVerdict(NamedTuple):
    """The verdict of the last decided step."""

    step: int
    digest: str
    body: bytes


class StepBook:
    """The record of a session's steps."""

    def __init__(self, next_step: int = 1) -> None:
        self.next_step = next_step
        self.is_finished = False  # whether the text is complete
        self.last: StoredVerdict | None = None

    def verdict_of(self, step: int, digest: str) -> bytes | None:
        """Return the stored verdict of a submitted tree; None if the tree must be verified.

        Raises:
            MessageError: another tree was submitted for this step, or this is neither the next step
                nor the last one; nothing has changed.
        """
        if self.last is not None and step == self.last.step:
            if digest != self.last.digest:
                raise self._conflict("step_conflict", step)
            return self.last.body
        if step != self.next_step:
            raise self._conflict("out_of_order", step)
        if self.is_finished:
            raise self._conflict("session_finished", step)
        return None

    def store(self, digest: str, verdict: bytes, is_finished: bool = False) -> None:
        """Keep the verdict of the next step's tree, before it is sent."""
        self.last = StoredVerdict(self.next_step, digest, verdict)
        self.next_step += 1
        self.is_finished = is_finished

    def _conflict(self, code: str, step: int) -> MessageError:
        expected = f"a tree for step {self.next_step}, or the last tree again"
        message = f"step {step} cannot be submitted ({code})"
        return MessageError(code, message, status=_CONFLICT, expected=expected)
