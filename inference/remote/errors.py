"""Errors of verification over a network, each with a short code that the other end can read."""

from jakiro.errors import JakiroError


class MessageError(JakiroError, ValueError):
    """A message that cannot be used; nothing has been decided because of it."""

    def __init__(
        self, code: str, message: str, *, expected: object = None, got: object = None
    ) -> None:
        super().__init__(message, expected=expected, got=got)
        self.code = code


class StepConflict(JakiroError, RuntimeError):
    """A step that cannot be submitted now; the session has not changed.

    Args:
        code: `step_conflict` if the step has another tree already, `out_of_order` if it is neither
            the next step nor the last one, or `session_finished`.
    """

    def __init__(self, code: str, step: int, next_step: int) -> None:
        super().__init__(
            f"step {step} cannot be submitted ({code})",
            expected=f"a tree for step {next_step}, or step {next_step - 1} with the same tree",
            got=f"step {step}",
            remedy="repeat the same bytes until their verdict arrives",
        )
        self.code = code
        self.next_step = next_step


class SessionGone(JakiroError, RuntimeError):
    """A session that the server has closed or lost; it can be opened again with `resume`."""

    code = "session_gone"

    def __init__(self) -> None:
        super().__init__(
            "the session does not exist any more", remedy="open another one with `resume`"
        )
