"""The state of a text at both ends, without input or output.

The device keeps all that is needed to go on with any server of the same target. The server decides
each step once, however often it is submitted: a reply may be lost, and the loss may depend on its
length. If the step were then decided again for another tree, or with other random numbers, the text
would not follow the target's distribution. A submitted tree is therefore binding, and its verdict
is kept until the next step is decided.
"""

from typing import Literal, NamedTuple

from inference.remote.messages import MessageError, OpenSession, Progress, SessionOpened, Verdict
from inference.remote.tree_frame import SubmittedTree

_CONFLICT = 409


class ClientSession:
    """The state of one text on the device.

        no session --on_opened--> drafting n --submit--> waiting n --on_verdict--> drafting n + 1
           ^                                              |  nothing arrives: the same bytes again
           `-------------------- on_gone -----------------'  (the bytes stay binding)

    Args:
        request: prompt and options; its `resume` is ignored.
    """

    def __init__(self, request: OpenSession) -> None:
        self.request = request
        self.session_id: str | None = None  # None while there is no session
        self.opened: SessionOpened | None = None  # how the last session began
        self.prompt_token_ids: list[int] = []
        self.emitted: list[int] = []
        self.text = ""
        self.next_step = 1
        self.is_finished = False
        self.submitted: SubmittedTree | None = None  # to be sent until its verdict arrives

    @property
    def token_ids(self) -> list[int]:
        """Prompt and emitted tokens; the last one is the root of the next tree."""
        return [*self.prompt_token_ids, *self.emitted]

    @property
    def finish_reason(self) -> Literal["stop", "length"] | None:
        """Why the text has ended, as in OpenAI's interface; None if it has not."""
        if not self.is_finished or self.opened is None:
            return None
        is_short = len(self.emitted) < self.request.max_tokens
        return "stop" if is_short or self.emitted[-1] in self.opened.end_ids else "length"

    @property
    def opening(self) -> OpenSession:
        """The request that opens a session, in which the text begins or goes on."""
        if not self.emitted:
            return self.request
        prompt = self.request.prompt
        progress = Progress(
            emitted=self.emitted,
            next_step=self.next_step,
            is_answer=isinstance(prompt, list) and not isinstance(prompt[0], int),
        )
        return self.request.model_copy(update={"prompt": self.prompt_token_ids, "resume": progress})

    def on_opened(self, opened: SessionOpened) -> None:
        """Begin the text, or continue it where another session ended."""
        if self.opened is not None:
            text = (self.prompt_token_ids, self.emitted, self.next_step)
            resumed = (opened.prompt_token_ids, opened.emitted, opened.next_step)
            if (opened.fingerprint, resumed) != (self.opened.fingerprint, text):
                raise MessageError("foreign_session", "the server cannot continue this text")
        self.opened, self.session_id = opened, opened.session
        self.prompt_token_ids, self.emitted = opened.prompt_token_ids, opened.emitted
        self.text, self.next_step = opened.text, opened.next_step
        self.is_finished = opened.finished

    def submit(self, tree: SubmittedTree) -> None:
        assert self.submitted is None, "one tree for each step"
        self.submitted = tree

    def on_verdict(self, verdict: Verdict) -> list[int]:
        """Return the tokens that the verdict of the submitted tree emits."""
        tree = self.submitted
        if tree is None or (verdict.step, verdict.digest) != (self.next_step, tree.digest):
            raise MessageError("foreign_verdict", "the server has answered for another tree")
        self.submitted = None
        self.next_step += 1
        self.emitted = [*self.emitted, *verdict.emitted]
        self.text += verdict.text
        self.is_finished = verdict.finished
        return verdict.emitted

    def on_gone(self) -> None:
        """Open another session next; bytes that were submitted stay binding."""
        self.session_id = None


class StoredVerdict(NamedTuple):
    step: int
    digest: str
    body: bytes


class VerdictLog:
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
        return MessageError(code, f"step {step} cannot be submitted ({code})", status=_CONFLICT)
