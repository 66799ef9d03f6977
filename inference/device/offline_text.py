"""A text that continues without a connection: provisional at first, and then verified.

sent, no answer for some seconds --> written alone, token by token, until the answer or the limit
verdict of the submitted tree    --> what continues it is the next step's tree
verdict of that tree             --> tokens up to the first difference stay, and drafting continues
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from inference.device.alone import AloneWriter
from inference.device.drafting import DeviceDrafting
from inference.device.link import ServerLink
from inference.device.loading import exported_folder
from inference.device.text import Answer, RemoteOutput, RemoteStep, RemoteText
from inference.drafters.names import LM, UntrainedName
from inference.engine.decode_step import BONUS, TARGET
from inference.generation.incremental_text import IncrementalText
from inference.generation.prompts import continued_tokens
from inference.protocol import Drafter, RequestTicket
from inference.remote.client_session import ClientSession, Draft, Fetch, Open, Send
from inference.remote.messages import MemoryOffer, OpenSession, SessionOpened
from inference.remote.provisional import ProvisionalText
from jakiro.errors import ConfigError, ResourceError
from jakiro.utils.background import in_background
from jakiro.utils.logs import quiet_libraries
from jakiro.utils.pretrained import load_tokenizer
from jakiro.utils.sequences import common_length

T = TypeVar("T")


@dataclass(frozen=True)
class OfflineWriting:
    """Options of a text that continues while the server cannot be reached.

    Attributes:
        tokenizer: the target's tokenizer, for the text of provisional tokens, which ends before
            stop strings; None to get only their ids, which then do not end at stop strings.
        after_seconds: seconds without an answer after which the drafter continues alone.
        max_tokens: largest number of provisional tokens; the drafter then waits.
    """

    tokenizer: PreTrainedTokenizerBase | None = None
    after_seconds: float = 1.0
    max_tokens: int = 256

    def with_tokenizer_of(self, name: str) -> "OfflineWriting":
        """Return the options with the tokenizer of a drafter, unless there is one already."""
        parsed = UntrainedName.parse(name)
        is_model = parsed is not None and parsed.kind == LM
        folder = name.partition("=")[2] if is_model else exported_folder(name)
        if self.tokenizer is not None or folder is None:
            return self
        with quiet_libraries():  # the config in the folder may be a drafter's
            return replace(self, tokenizer=load_tokenizer(str(folder)))


def check_writes_alone(drafter: Drafter | None) -> None:
    """Raise an error if there is no drafter that could write alone.

    Drafters that look up text can write only what they find, which is often nothing.
    """
    if drafter is None:
        raise ConfigError(
            "nothing can be written without a drafter while the server cannot be reached",
            expected="a drafter that predicts any text, such as lm=MODEL or a trained drafter",
            got="no drafter",
            remedy="choose a drafter, or wait for the server (without `offline`)",
        )


@dataclass
class ProvisionalCounts:
    """Counts of the tokens of one text that were written alone, and those without a verdict.

    Attributes:
        unverified: provisional tokens at the end of a text that the server did not complete.
    """

    num_written: int = 0
    num_kept: int = 0
    unverified: list[int] = field(default_factory=list)
    unverified_text: str = ""

    @property
    def num_retracted(self) -> int:
        """The number of provisional tokens that the target has replaced."""
        return self.num_written - self.num_kept - len(self.unverified)


@dataclass(frozen=True, repr=False)
class OfflineOutput(RemoteOutput):
    """The output for one prompt, whose tokens are all verified, and what was written alone."""

    provisional: ProvisionalCounts = field(default_factory=ProvisionalCounts)


class OfflineText(RemoteText):
    """A text that the drafter continues alone while the server cannot be reached.

    The first answer of the server is awaited in any case. If the server does not return, the text
    ends, and its provisional tokens remain unverified.
    """

    def __init__(
        self,
        link: ServerLink,
        request: OpenSession,
        new_drafting: Callable[[ClientSession], DeviceDrafting],
        ticket: RequestTicket | None = None,
        memory: MemoryOffer | None = None,
        *,
        options: OfflineWriting | None = None,
        seed: int | None = None,
    ) -> None:
        own = (link, request, new_drafting, ticket, memory)
        super().__init__(*own, stops=True, seed=seed)
        self.options = options or OfflineWriting()
        self.counts = ProvisionalCounts()
        self._provisional = ProvisionalText()
        self._writer: AloneWriter | None = None  # None unless the drafter writes alone
        self._text = self._verified_text()
        self._call: Future[Any] | None = None  # the last request in the background
        self._num_attempts = 0
        self._most = 0  # largest number of provisional tokens

    def output(self) -> OfflineOutput:
        """Return the output of the text, as far as it was verified."""
        return OfflineOutput(**vars(super().output()), provisional=self.counts)

    def _performed(self, action: Open | Fetch | Draft | Send) -> Iterator[RemoteStep]:
        """Perform an action, and yield its steps and those that are written alone meanwhile."""
        if isinstance(action, Draft) or not self._session.emitted:
            yield from super()._performed(action)
            return
        _ = self._own_drafting  # which two threads would make twice
        if isinstance(action, Fetch):
            rows = yield from self._awaited(lambda: self._asked_for_rows(action))
            self._fetched(action, rows)
            return
        answer = yield from self._awaited(lambda: self._asked(action))
        if (step := self._answered(answer)) is not None:
            yield step
            if rest := self._provisional.token_ids:
                self._text = self._verified_text()
                yield _provisional_step(*self._text.push(rest))

    def _awaited(self, ask: Callable[[], T]) -> Generator[RemoteStep, None, T]:
        """Yield provisional steps until there is an answer, and return the answer."""
        call = self._call = in_background(ask)
        with self._clock("verify"):
            wait([call], 0.0 if self._writer else self.options.after_seconds)
        if not call.done():
            yield from self._written_alone(call)
            with self._clock("verify"):
                wait([call])
        return call.result()

    def _written_alone(self, call: Future[T]) -> Iterator[RemoteStep]:
        """Yield provisional tokens until the call has ended, or no more may be written."""
        yield from self._begin()
        assert self._writer is not None
        provisional = self._provisional
        while not (call.done() or self._text.has_ended) and len(provisional.token_ids) < self._most:
            with self._clock("draft"):
                token = self._writer.next(provisional.token_ids)
            if token is None:
                return
            provisional.written.append(token)
            self.counts.num_written += 1
            yield _provisional_step(*self._text.push([token.token_id]))

    def _begin(self) -> Iterator[RemoteStep]:
        """Guess the outcome of the submitted tree, unless the drafter writes alone already.

        If nothing is submitted, the drafter continues what is left of its text.
        """
        if self._writer is not None:
            return
        session = self._session
        self._text = self._verified_text()
        known = self._provisional.token_ids
        new, text = list[int](), ""
        if self._tree is None:
            self._text.push(known)
        else:
            path = [self._tree.token_ids[node] for node in self._tree.best_path()]
            guess, _ = self._text.push(path[: len(known)])  # text that was submitted
            new, text = self._text.push(path[len(known) :])
            self._provisional = ProvisionalText([*guess, *new])
        left = session.request.max_tokens - len(session.emitted)
        self._most = min(self.options.max_tokens, session.limits.max_chain, left)
        self._num_attempts += 1
        token_ids = [*session.prompt_token_ids, *session.emitted]
        self._writer = AloneWriter(
            self._own_drafting, token_ids, session.next_step, self._num_attempts, self._most
        )
        if new:
            self.counts.num_written += len(new)
            yield _provisional_step(new, text)

    def _draft(self, action: Draft) -> None:
        """Submit the provisional text after the last verdict, or draft a tree if there is none."""
        self._stop_writing()
        if not self._provisional.written:
            super()._draft(action)
            return
        self._submit(action, self._provisional.chain(self._session.limits.max_chain))

    def _answered(self, answer: Answer) -> RemoteStep | None:
        """Apply an answer; a verdict ends the writing alone."""
        step = super()._answered(answer)
        if step is not None and not isinstance(answer, SessionOpened):
            self._reconcile(step.token_ids)
        return step

    def _reconcile(self, emitted: list[int]) -> None:
        shown = self._provisional.token_ids
        num_equal = common_length(shown, emitted)
        self.counts.num_kept += num_equal
        if self._stop_writing():
            self._provisional = self._provisional.after(emitted)
        else:  # the submitted tree contained all provisional tokens
            self._provisional = ProvisionalText()
        if self._session.is_finished:
            self._provisional = ProvisionalText()

    def _stop_writing(self) -> bool:
        """Let the drafter forget its text, and return whether it was writing."""
        if (writer := self._writer) is None:
            return False
        writer.stop()
        self._writer = None
        return True

    def _close(self) -> None:
        """Free the session on the server, also one that is only now being opened."""
        super()._close()
        if self._call is not None:
            self._call.add_done_callback(self._end_opened)

    def _end_opened(self, call: Future[Any]) -> None:
        opened = None if call.exception() is not None else call.result()
        if isinstance(opened, SessionOpened) and opened.session != self._session.session_id:
            self._link.end(opened.session)

    def _verified_text(self) -> "_GrowingText":
        """Return the text of the verified tokens."""
        session = self._session
        text = _GrowingText(
            self.options.tokenizer, session.request, session.end_ids, session.prompt_token_ids
        )
        text.push(session.emitted)
        return text

    def _give_up(self, error: ResourceError) -> None:
        """End the text; its provisional tokens remain unverified."""
        counts, text = self.counts, self._verified_text()
        counts.unverified, counts.unverified_text = text.push(self._provisional.token_ids)
        counts.unverified_text += text.flush()
        super()._give_up(error)


class _GrowingText:
    """Tokens and their text, up to the token at which the server would end the text."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        request: OpenSession,
        end_ids: Sequence[int],
        prompt_token_ids: Sequence[int],
    ) -> None:
        self.has_ended = False
        self._text = None
        if tokenizer is not None:
            before = continued_tokens(request.prompt, prompt_token_ids)
            self._text = IncrementalText(tokenizer, request.stop, before=before)
        self._num_left = request.max_tokens
        self._end_ids = frozenset(end_ids)

    def push(self, token_ids: Sequence[int]) -> tuple[list[int], str]:
        """Return the tokens that belong to the text, and the text that they add."""
        taken, text = [], ""
        for token in token_ids:
            if self.has_ended:
                break
            taken.append(token)
            text += "" if self._text is None else self._text.push(token)
            self._num_left -= 1
            is_stopped = self._text is not None and self._text.is_stopped
            self.has_ended = token in self._end_ids or is_stopped or self._num_left <= 0
        return taken, text + (self.flush() if taken and self.has_ended else "")

    def flush(self) -> str:
        """Return the text that was held back."""
        return "" if self._text is None else self._text.flush()


def _provisional_step(token_ids: list[int], text: str) -> RemoteStep:
    depths, proposers = [BONUS] * len(token_ids), [TARGET] * len(token_ids)
    return RemoteStep(
        token_ids, depths, False, proposer_ids=proposers, text=text, is_verified=False
    )
