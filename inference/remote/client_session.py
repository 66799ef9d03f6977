"""The device's side of a text: all that is needed to go on with any server of the same target."""

from typing import Literal

from inference.remote.messages import MessageError, OpenSession, Progress, SessionOpened, Verdict
from inference.remote.tree_frame import SubmittedTree


class ClientSession:
    """The state of one text on the device, without input or output.

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
        self.num_resumes = 0
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
                raise MessageError(
                    "foreign_session",
                    "the server cannot continue this text",
                    expected=f"target {self.opened.fingerprint}, step {self.next_step}",
                    got=f"target {opened.fingerprint}, step {opened.next_step}",
                )
            self.num_resumes += 1
        self.opened, self.session_id = opened, opened.session
        self.prompt_token_ids, self.emitted = opened.prompt_token_ids, opened.emitted
        self.text, self.next_step = opened.text, opened.next_step
        self.is_finished = opened.finished

    def submit(self, tree: SubmittedTree) -> None:
        """Bind the next step to a tree."""
        assert self.submitted is None, "one tree for each step"
        self.submitted = tree

    def on_verdict(self, verdict: Verdict) -> list[int]:
        """Return the tokens that the verdict of the submitted tree emits."""
        tree = self.submitted
        if tree is None or (verdict.step, verdict.digest) != (self.next_step, tree.digest):
            raise MessageError(
                "foreign_verdict",
                "the server has answered for another tree",
                expected=f"the verdict of step {self.next_step}",
                got=f"that of step {verdict.step}",
            )
        self.submitted = None
        self.next_step += 1
        self.emitted = [*self.emitted, *verdict.emitted]
        self.text += verdict.text
        self.is_finished = verdict.finished
        return verdict.emitted

    def on_gone(self) -> None:
        """Open another session next; bytes that were submitted stay binding."""
        self.session_id = None
