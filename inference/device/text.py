"""One text that a device drafts and a server verifies."""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeAlias

import torch

from inference.device.drafting import DeviceDrafting
from inference.device.link import AnsweredStep, LinkTraffic, Rows, ServerLink, SessionGone
from inference.draft_tree import SequenceTree
from inference.engine.decode_step import BONUS, TARGET, DecodeStep
from inference.engine.stats import DecodeStats
from inference.outputs import GenerateOutput
from inference.protocol import Drafter, RequestTicket
from inference.remote.memory_rows import MAX_ROWS, RowFormat
from inference.remote.messages import OpenSession, SessionOpened
from inference.remote.text_state import ClientSession
from inference.remote.tree_frame import encode_step
from jakiro.errors import ResourceError

Answer: TypeAlias = SessionOpened | AnsweredStep | Rows

_MOST_LOST = 8  # largest number of sessions that are lost one after another


@dataclass(frozen=True)
class RemoteStep(DecodeStep):
    """The tokens of one decoding step, and the text that they add.

    Steps that are not verified are provisional: the next verified step replaces all of them.
    """

    text: str = ""
    is_verified: bool = True


@dataclass(frozen=True, repr=False)
class RemoteOutput(GenerateOutput):
    """The output for one prompt, and what was sent and received for it.

    The seconds in `stats` are those of the device: `verify` includes the network.

    Attributes:
        seed: seed of the text, with which the same drafter and server write the same text again.
        finish_reason: why the text ends, as in OpenAI's interface: "stop" if the target has ended
            it, or a stop string has; "length" at the largest number of tokens; None if the server
            has not completed it.
        error: reason why the text ends before it is complete; None if it is complete.
    """

    traffic: LinkTraffic = field(default_factory=LinkTraffic)
    seed: int = 0
    finish_reason: Literal["stop", "length"] | None = None
    error: ResourceError | None = None

    @property
    def is_verified(self) -> bool:
        """Whether the server has completed the text; if not, `error` is the reason."""
        return self.error is None


class RemoteText:
    """A text in progress, which survives lost connections and a change of the server.

    Args:
        rows: form of the rows of memory that the drafter reads; None if it reads tokens alone.
        stops: whether a text that the server does not complete ends with what was verified, and
            has an `error`; otherwise, the error is raised.
        seed: seed that was chosen for the text; None for that of the request, which may depend on
            the number of the text.
    """

    def __init__(
        self,
        link: ServerLink,
        request: OpenSession,
        drafter: Drafter | None,
        rows: RowFormat | None = None,
        *,
        stops: bool = False,
        ticket: RequestTicket | None = None,
        seed: int | None = None,
    ) -> None:
        self.seed = request.seed if seed is None else seed
        self.traffic = LinkTraffic()
        self.error: ResourceError | None = None
        self.stats = DecodeStats()
        self._stops = stops
        self._link = link
        self._session = ClientSession(request)
        self._drafter, self._rows = drafter, rows
        self._ticket = ticket
        self._drafting: DeviceDrafting | None = None  # until the session is open
        self._tree: SequenceTree | None = None  # the submitted tree
        self._depths: list[int] = []
        self._num_lost = 0  # sessions that were lost since anything arrived

    def steps(self) -> Generator[RemoteStep, None, None]:
        started = time.monotonic()
        try:
            while not (self._session.is_finished or self.error):
                for step in self._next_or_end():
                    self._depths += step.depths if step.is_verified else []
                    yield step
        finally:
            self.stats.seconds["total"] = time.monotonic() - started
            self._close()

    def output(self) -> RemoteOutput:
        session = self._session
        return RemoteOutput(
            sequences=torch.tensor([session.token_ids]),
            new_token_ids=session.emitted,
            depths=self._depths,
            text=session.text,
            stats=self.stats,
            traffic=self.traffic,
            seed=self.seed,
            finish_reason=session.finish_reason,
            error=self.error,
        )

    def _next_or_end(self) -> Iterator[RemoteStep]:
        """Do what is next, or end a text that was begun and whose server is away."""
        try:
            yield from self._next()
        except ResourceError as error:
            if not (self._stops and self._session.emitted):
                raise
            self.error = error

    def _next(self) -> Iterator[RemoteStep]:
        """Open a session, submit a tree, fetch memory, or draft; yield the steps that it gives."""
        if (ask := self._request()) is None:
            with self._clock("draft"):
                self._draft()
            return
        try:
            answer = yield from self._await_answer(ask)
        except SessionGone:
            self._lose_session()
        else:
            yield from self._apply(answer)

    def _request(self) -> Callable[[], Answer] | None:
        """Return the next request; None if a tree must be drafted first."""
        session, link, traffic = self._session, self._link, self.traffic
        session_id, tree = session.session_id, session.submitted
        if session_id is None:
            return partial(link.open, session.opening, traffic)
        has_rows = self._rows is not None
        if tree is not None:
            step = session.next_step
            return partial(link.submit, session_id, step, tree.body, traffic, has_rows)
        begin, end = self._local_drafting.num_readable, len(session.token_ids) - 1
        if has_rows and begin < end:
            return partial(link.memory, session_id, begin, min(end, begin + MAX_ROWS), traffic)
        return None

    def _await_answer(self, ask: Callable[[], Answer]) -> Generator[RemoteStep, None, Answer]:
        """Return the answer to a request; a subclass may yield steps meanwhile."""
        with self._clock("verify" if self._session.submitted else "prefill"):
            answer = ask()
        yield from ()
        return answer

    def _apply(self, answer: Answer) -> Iterator[RemoteStep]:
        """Apply an answer, and yield its step if there is one."""
        if isinstance(answer, SessionOpened):
            yield from self._on_opened(answer)
            return
        self._num_lost = 0
        if isinstance(answer, AnsweredStep):
            yield self._on_verdict(answer)
        else:
            self._local_drafting.add_rows(answer)

    def _lose_session(self) -> None:
        self._num_lost += 1
        if self._num_lost > _MOST_LOST:
            raise ResourceError(
                f"the server at {self._link.url} loses the text again and again",
                remedy="check that all requests reach the same server, and its log and memory",
            )
        self._link.pause_after_losses(self._num_lost)
        self._session.on_gone()

    def _on_opened(self, opened: SessionOpened) -> Iterator[RemoteStep]:
        session = self._session
        is_first = session.opened is None
        session.on_opened(opened)
        self.traffic.num_resumes += not is_first
        if is_first:
            emitted = session.emitted
            self.stats.emitted += len(emitted)
            yield self._step(emitted, [BONUS] * len(emitted), [TARGET] * len(emitted), opened.text)

    def _draft(self) -> None:
        session = self._session
        self._submit(self._local_drafting.tree(session.token_ids, session.next_step))

    def _submit(self, tree: SequenceTree) -> None:
        """Bind the next step to a tree."""
        self._tree, token_ids = tree, self._session.token_ids
        self._session.submit(encode_step(len(token_ids) - 1, token_ids[-1], tree))

    @property
    def _local_drafting(self) -> DeviceDrafting:
        """The drafter's side, which is made when it is first used."""
        if self._drafting is None:
            session = self._session
            assert session.opened is not None, "open a session first"
            self._drafting = DeviceDrafting(
                self._drafter, session.request, session.opened, self._rows
            )
        return self._drafting

    def _on_verdict(self, answered: AnsweredStep) -> RemoteStep:
        verdict, tree = answered.verdict, self._tree
        emitted = self._session.on_verdict(verdict)
        assert tree is not None, "the verdict is that of a submitted tree"
        if answered.rows is not None:
            self._local_drafting.add_rows(answered.rows)
        self._tree = None  # nothing is submitted
        path = tree.follow(emitted[: verdict.num_accepted])
        num_others = len(emitted) - len(path)
        depths = [*(tree.depth[node] for node in path), *[BONUS] * num_others]
        proposers = [*(tree.proposer_id[node] for node in path), *[TARGET] * num_others]
        self.stats.count(tree, path, len(emitted))
        self.stats.target_forwards += 1
        return self._step(emitted, depths, proposers, verdict.text)

    def _step(
        self, token_ids: list[int], depths: list[int], proposers: list[int], text: str
    ) -> RemoteStep:
        return RemoteStep(
            token_ids, depths, self._session.is_finished, proposer_ids=proposers, text=text
        )

    @contextmanager
    def _clock(self, part: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.stats.seconds[part] += time.monotonic() - started

    def _close(self) -> None:
        """Free the session on the server, and the memory of the drafter."""
        session = self._session
        self.traffic.has_ended = True  # a thread may still repeat a request
        with ExitStack() as ends:  # from the last one to the first, even after an error
            if self._ticket is not None:
                ends.callback(self._ticket.end)
            if self._drafting is not None:
                ends.callback(self._drafting.close, session.token_ids)
            if session.session_id is not None:
                ends.callback(self._link.end, session.session_id)
