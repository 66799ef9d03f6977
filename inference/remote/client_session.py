"""The device's side of a session: its next action, whatever was lost; without input or output.

    opening --opened--> drafting n --submit--> waiting n --verdict--> drafting n + 1 ... done
       ^                                          | nothing arrives: the same bytes again
       `------------- session gone ---------------'   (opened with `resume`; the bytes stay)

If the drafter reads a memory, rows of it arrive with verdicts, and those that are missing, such as
the prompt's, are fetched before a tree is drafted.

The device has everything that is needed to continue with any server of the same target: prompt,
seed, emitted tokens, number of the step, and the bytes that it has submitted.
"""

from typing import Literal, NamedTuple, TypeAlias

from inference.remote.errors import MessageError
from inference.remote.messages import (
    OpenSession,
    Progress,
    SessionOpened,
    TreeLimits,
    Verdict,
)
from inference.remote.step_frame import SubmittedTree


class Open(NamedTuple):
    """Open a session."""

    request: OpenSession


class Fetch(NamedTuple):
    """Fetch rows of the memory of verified tokens, and pass their number to `on_rows`."""

    session: str
    begin: int
    end: int


class Draft(NamedTuple):
    """Draft a tree below the last token, and pass it to `submit`."""

    step: int
    token_ids: list[int]  # prompt and emitted tokens; the last one is the root


class Send(NamedTuple):
    """Send these bytes, until their verdict arrives."""

    session: str
    step: int
    body: bytes


class Done(NamedTuple):
    """The text is complete, or was given up."""

    session: str  # empty if there is no session


Action: TypeAlias = Open | Fetch | Draft | Send | Done


class ClientSession:
    """The state of one text on the device.

    Args:
        request: prompt and options; its `resume` is ignored.
    """

    def __init__(self, request: OpenSession, max_rows: int = 256) -> None:
        self.request = request
        self.num_rows = 0
        self._max_rows = max_rows
        self.prompt_token_ids: list[int] = []
        self.emitted: list[int] = []
        self.text = ""
        self.next_step = 1
        self.is_finished = False
        self.is_given_up = False
        self.samples = False
        self.limits = TreeLimits()
        self.end_ids: list[int] = []
        self.num_resumes = 0
        self._session: str | None = None
        self._fingerprint: str | None = None  # fingerprint of the first server
        self._pending: SubmittedTree | None = None

    @property
    def session_id(self) -> str | None:
        """The id of the session; None while there is none."""
        return self._session

    @property
    def finish_reason(self) -> Literal["stop", "length"] | None:
        """Why the text has ended, as in OpenAI's interface; None if it has not."""
        if not self.is_finished:
            return None
        is_short = len(self.emitted) < self.request.max_tokens
        return "stop" if is_short or self.emitted[-1] in self.end_ids else "length"

    @property
    def action(self) -> Action:
        """The next thing to do; repeating it does no harm."""
        if self.is_given_up:
            return Done(self._session or "")
        if self._session is None:
            return Open(self._opening())
        if self.is_finished:
            return Done(self._session)
        if self._pending is not None:
            return Send(self._session, self.next_step, self._pending.body)
        if self.request.memory is not None and self.num_rows < self.base_length:
            end = min(self.base_length, self.num_rows + self._max_rows)
            return Fetch(self._session, self.num_rows, end)
        return Draft(self.next_step, [*self.prompt_token_ids, *self.emitted])

    def on_opened(self, opened: SessionOpened) -> None:
        """Begin the text, or continue it where another session ended."""
        if self._fingerprint is not None:
            self._check_resumed(opened, self._fingerprint)
            self.num_resumes += 1
        self._session, self._fingerprint = opened.session, opened.fingerprint
        self.prompt_token_ids, self.emitted = opened.prompt_token_ids, opened.emitted
        self.text, self.limits, self.samples = opened.text, opened.limits, opened.samples
        self.next_step, self.is_finished = opened.next_step, opened.finished
        self.end_ids = opened.end_ids

    def submit(self, tree: SubmittedTree) -> None:
        """Bind the next step to a tree."""
        assert isinstance(self.action, Draft), "one tree for each step"
        self._pending = tree

    def on_rows(self, begin: int, count: int) -> bool:
        """Return whether rows of memory are the next ones; the drafter must then get them.

        Raises:
            MessageError: there are more rows than verified tokens.
        """
        if begin != self.num_rows:
            return False
        if begin + count > self.base_length:
            raise MessageError(
                "too_many_rows",
                "the server has sent memory of more tokens than it has verified",
                expected=f"at most {self.base_length}",
                got=begin + count,
            )
        self.num_rows += count
        return True

    def on_verdict(self, verdict: Verdict) -> list[int]:
        """Return the tokens that a verdict emits; none if it is the verdict of an earlier step.

        Rows of memory that come with the verdict begin with that of the tree's root; pass them to
        `on_rows` afterwards.

        Raises:
            MessageError: the verdict is about a tree other than the submitted one.
        """
        if verdict.step < self.next_step:
            return []
        pending = self._pending
        if pending is None or (verdict.step, verdict.digest) != (self.next_step, pending.digest):
            raise MessageError(
                "foreign_verdict",
                "the server has answered for another tree",
                expected=f"the verdict of step {self.next_step}",
                got=f"that of step {verdict.step}",
            )
        self._pending = None
        self.next_step += 1
        self.emitted = [*self.emitted, *verdict.emitted]
        self.text += verdict.text
        self.is_finished = verdict.finished
        return verdict.emitted

    def on_gone(self) -> None:
        """Open another session next; bytes that were submitted stay binding."""
        self._session = None

    def give_up(self) -> None:
        """End the text before it is complete."""
        self.is_given_up = True

    @property
    def base_length(self) -> int:
        """The number of tokens before the root."""
        return len(self.prompt_token_ids) + len(self.emitted) - 1

    def _opening(self) -> OpenSession:
        if not self.emitted:
            return self.request
        prompt = self.request.prompt
        progress = Progress(
            emitted=self.emitted,
            next_step=self.next_step,
            is_answer=isinstance(prompt, list) and not isinstance(prompt[0], int),
        )
        known = {"prompt": self.prompt_token_ids, "resume": progress}
        return self.request.model_copy(update=known)

    def _check_resumed(self, opened: SessionOpened, fingerprint: str) -> None:
        known = (fingerprint, self.prompt_token_ids, self.emitted, self.next_step)
        found = (opened.fingerprint, opened.prompt_token_ids, opened.emitted, opened.next_step)
        if known != found:
            raise MessageError(
                "foreign_session",
                "the server cannot continue this text",
                expected=f"target {fingerprint}, step {self.next_step}",
                got=f"target {opened.fingerprint}, step {opened.next_step}",
            )
