"""One text that a device drafts and a server verifies."""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch

from inference.device.drafting import DeviceDrafting
from inference.device.link import AnsweredStep, LinkTraffic, Rows, ServerLink
from inference.draft_tree import SequenceTree
from inference.engine.decode_step import BONUS, TARGET, DecodeStep
from inference.engine.stats import DecodeStats
from inference.outputs import GenerateOutput
from inference.protocol import RequestTicket
from inference.remote.client_session import ClientSession, Done, Draft, Fetch, Open, Send
from inference.remote.messages import MemoryOffer, OpenSession, SessionOpened
from inference.remote.step_frame import encode_step
from jakiro.errors import ResourceError

Answer: TypeAlias = SessionOpened | AnsweredStep | None  # None if the session is gone

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
        new_drafting: function that returns the drafter's side, as soon as it is known whether the
            server samples tokens.
        stops: whether a text that the server does not complete ends with what was verified, and
            has an `error`; otherwise, the error is raised.
        seed: seed that was chosen for the text; None for that of the request, which may depend on
            the number of the text.
    """

    def __init__(
        self,
        link: ServerLink,
        request: OpenSession,
        new_drafting: Callable[[ClientSession], DeviceDrafting],
        ticket: RequestTicket | None = None,
        memory: MemoryOffer | None = None,
        *,
        stops: bool = False,
        seed: int | None = None,
    ) -> None:
        self.seed = request.seed if seed is None else seed
        self.traffic = LinkTraffic()
        self.error: ResourceError | None = None
        self._stops = stops
        self.stats = DecodeStats()
        self._link = link
        max_rows = 1 if memory is None else memory.max_rows
        self._session = ClientSession(request, max_rows)
        self._new_drafting = new_drafting
        self._ticket = ticket
        self._drafting: DeviceDrafting | None = None
        self._tree: SequenceTree | None = None  # the submitted tree
        self._depths: list[int] = []
        self._num_lost = 0  # sessions that were lost since anything arrived

    def steps(self) -> Generator[RemoteStep, None, None]:
        """Yield the steps as their verdicts arrive."""
        started = time.monotonic()
        try:
            while not isinstance(action := self._session.action, Done):
                for step in self._performed_or_ended(action):
                    self._depths += step.depths if step.is_verified else []
                    yield step
                self.stats.seconds["total"] = time.monotonic() - started
        finally:
            self.stats.seconds["total"] = time.monotonic() - started
            self._close()

    def output(self) -> RemoteOutput:
        """Return the output of the text, as far as it was written."""
        known = self._session
        return RemoteOutput(
            sequences=torch.tensor([[*known.prompt_token_ids, *known.emitted]]),
            new_token_ids=known.emitted,
            depths=self._depths,
            text=known.text,
            stats=self.stats,
            traffic=self.traffic,
            seed=self.seed,
            finish_reason=known.finish_reason,
            error=self.error,
        )

    def _performed_or_ended(self, action: Open | Fetch | Draft | Send) -> Iterator[RemoteStep]:
        """Perform an action, or end a text that was begun and whose server is away."""
        try:
            yield from self._performed(action)
        except ResourceError as error:
            if not (self._stops and self._session.emitted):
                raise
            self._give_up(error)

    def _give_up(self, error: ResourceError) -> None:
        """End the text with what was verified."""
        self.error = error
        self._session.give_up()

    def _performed(self, action: Open | Fetch | Draft | Send) -> Iterator[RemoteStep]:
        """Perform an action, and yield its steps."""
        if isinstance(action, Draft):
            self._draft(action)
            return
        if isinstance(action, Fetch):
            with self._clock("prefill"):
                rows = self._asked_for_rows(action)
            self._fetched(action, rows)
            return
        with self._clock("prefill" if isinstance(action, Open) else "verify"):
            answer = self._asked(action)
        if (step := self._answered(answer)) is not None:
            yield step

    def _asked(self, action: Open | Send) -> Answer:
        """Return the server's answer."""
        if isinstance(action, Open):
            return self._link.open(action.request, self.traffic)
        return self._link.submit(action, self.traffic, self._own_drafting.row_bytes)

    def _asked_for_rows(self, action: Fetch) -> Rows | None:
        """Return rows of memory; None if the session is gone."""
        row_bytes = self._own_drafting.row_bytes
        assert row_bytes is not None, "only a drafter with a memory fetches rows"
        return self._link.memory(action, self.traffic, row_bytes)

    def _answered(self, answer: Answer) -> RemoteStep | None:
        """Apply an answer, and return its step if there is one."""
        if answer is None:
            self._lose_session()
            return None
        return self._opened(answer) if isinstance(answer, SessionOpened) else self._verified(answer)

    def _fetched(self, action: Fetch, rows: Rows | None) -> None:
        """Pass fetched rows to the drafter."""
        if rows is None:
            self._lose_session()
            return
        self._add_rows(action.begin, rows)

    def _lose_session(self) -> None:
        """Open another session next."""
        self._num_lost += 1
        if self._num_lost > _MOST_LOST:
            raise ResourceError(
                f"the server at {self._link.url} loses the text again and again",
                expected="a session that lasts until its next step is decided",
                got=f"{self._num_lost} sessions that ended before that",
                remedy="check that all requests reach the same server, and its log and memory",
            )
        self._link.pause_after_losses(self._num_lost)
        self._session.on_gone()

    def _add_rows(self, begin: int, rows: Rows) -> None:
        """Pass rows of memory to the drafter, if they are the next ones."""
        if self._session.on_rows(begin, len(rows)):
            self._own_drafting.add_rows(rows)
            self._num_lost = 0

    def _opened(self, opened: SessionOpened) -> RemoteStep | None:
        session = self._session
        is_first = not session.emitted
        session.on_opened(opened)
        self.traffic.num_resumes = session.num_resumes
        if not is_first:
            return None
        emitted = session.emitted
        self.stats.emitted += len(emitted)
        return self._step(emitted, [BONUS] * len(emitted), [TARGET] * len(emitted), session.text)

    def _draft(self, action: Draft) -> None:
        with self._clock("draft"):
            self._submit(action, self._own_drafting.tree(action.token_ids, action.step))

    def _submit(self, action: Draft, tree: SequenceTree) -> None:
        """Bind a step to a tree."""
        self._tree, token_ids = tree, action.token_ids
        self._session.submit(encode_step(len(token_ids) - 1, token_ids[-1], tree))

    @property
    def _own_drafting(self) -> DeviceDrafting:
        """The drafter's side, which is made when it is first used."""
        if self._drafting is None:
            self._drafting = self._new_drafting(self._session)
        return self._drafting

    def _verified(self, answered: AnsweredStep) -> RemoteStep | None:
        verdict, session = answered.verdict, self._session
        begin = session.base_length
        emitted = session.on_verdict(verdict)
        if not emitted:
            return None
        self._num_lost = 0
        if answered.rows is not None:
            self._add_rows(begin, answered.rows)
        assert self._tree is not None
        tree = self._tree
        path = tree.follow(emitted[: verdict.num_accepted])
        self._tree = None  # nothing is submitted
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
        """Add the seconds of the block to the statistics."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.stats.seconds[part] += time.monotonic() - started

    def _close(self) -> None:
        """Free the session on the server, and the memory of the drafter."""
        known = self._session
        self.traffic.has_ended = True  # a thread may still repeat a request
        with ExitStack() as ends:  # from the last one to the first, even after an error
            if self._ticket is not None:
                ends.callback(self._ticket.end)
            if self._drafting is not None:
                ends.callback(self._drafting.close, [*known.prompt_token_ids, *known.emitted])
            if known.session_id is not None:
                ends.callback(self._link.end, known.session_id)
