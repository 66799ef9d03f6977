"""A text that continues without a connection: provisional at first, and then verified.

sent, no answer for some seconds --> written alone, token by token, until the answer or the limit
verdict of the submitted tree    --> what continues it is the next step's tree
verdict of that tree             --> tokens up to the first difference stay, and drafting continues
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from inference.device.link import AnsweredStep, Rows
from inference.device.loading import exported_folder
from inference.device.provisional import AloneWriter, ProvisionalText
from inference.device.text import Answer, RemoteOutput, RemoteStep, RemoteText
from inference.drafters.names import LM, UntrainedName
from inference.engine.decode_step import BONUS, TARGET
from inference.generation.incremental_text import IncrementalText
from inference.generation.prompts import continued_tokens
from inference.remote.client_session import ClientSession
from inference.remote.messages import SessionOpened
from jakiro.errors import ResourceError
from jakiro.utils.logs import quiet_libraries
from jakiro.utils.pretrained import load_tokenizer
from jakiro.utils.progress import in_background
from jakiro.utils.token_text import common_length


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


@dataclass
class ProvisionalCounts:
    """Counts of the tokens of one text that were written alone, and those without a verdict.

    Attributes:
        unverified: provisional tokens at the end of a text that the server did not complete.
    """

    num_written: int = 0
    num_kept: int = 0
    unverified: list[int] = field(default_factory=list)

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

    def __init__(self, *arguments: Any, options: OfflineWriting, **others: Any) -> None:
        super().__init__(*arguments, **others, stops=True)
        self.options = options
        self.counts = ProvisionalCounts()
        self._provisional = ProvisionalText()
        self._writer: AloneWriter | None = None  # None unless the drafter writes alone
        self._text = _GrowingText(self._session, None)  # of all tokens, while it writes
        self._num_attempts = 0
        self._most = 0  # largest number of provisional tokens
        self._call: Future[Answer] | None = None  # the last request in the background

    def output(self) -> OfflineOutput:
        """Return the output of the text, as far as it was verified."""
        return OfflineOutput(**vars(super().output()), provisional=self.counts)

    def _awaited(self, ask: Callable[[], Answer]) -> Generator[RemoteStep, None, Answer]:
        """Return the answer to a request, and yield what is written alone until it arrives."""
        if not self._session.emitted:
            return (yield from super()._awaited(ask))
        call = self._call = in_background(ask)
        with self._clock("verify"):
            wait([call], 0.0 if self._writer else self.options.after_seconds)
        if not call.done():
            yield from self._written_alone(call)
            with self._clock("verify"):
                wait([call])
        return call.result()

    def _written_alone(self, call: Future[Answer]) -> Iterator[RemoteStep]:
        """Yield provisional tokens until the call has ended, or no more may be written."""
        if self._writer is None:
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
        """Let the drafter write after a guess of the submitted tree's outcome.

        If nothing is submitted, it continues what is left of its text.
        """
        session = self._session
        assert session.opened is not None, "the first answer is awaited"
        self._text = self._verified_text()
        known = self._provisional.token_ids  # part of the submitted tree, if there is one
        new, text = list[int](), ""
        if self._tree is None:
            self._text.push(known)
        else:
            path = [self._tree.token_ids[node] for node in self._tree.best_path()]
            guess, _ = self._text.push(path[: len(known)])
            new, text = self._text.push(path[len(known) :])
            self._provisional = ProvisionalText([*guess, *new])
        left = session.request.max_tokens - len(session.emitted)
        self._most = min(self.options.max_tokens, session.opened.limits.max_chain, left)
        self._num_attempts += 1
        self._writer = AloneWriter(
            self._own_drafting, session.token_ids, session.next_step, self._num_attempts, self._most
        )
        if new:
            self.counts.num_written += len(new)
            yield _provisional_step(new, text)

    def _draft(self) -> None:
        """Submit the provisional text after the last verdict, or draft a tree if there is none."""
        self._stop_writing()
        if not self._provisional.written:
            super()._draft()
            return
        self._submit(self._provisional.chain(self._own_drafting.limits.max_chain))

    def _apply(self, answer: SessionOpened | AnsweredStep | Rows) -> Iterator[RemoteStep]:
        """Apply an answer; a verdict ends the writing alone, and what is left is shown again."""
        for step in super()._apply(answer):
            self._reconcile(step.token_ids)
            yield step
            if rest := self._provisional.token_ids:
                self._text = self._verified_text()
                yield _provisional_step(*self._text.push(rest))

    def _reconcile(self, emitted: list[int]) -> None:
        """Keep the provisional text that continues a verdict."""
        self.counts.num_kept += common_length(self._provisional.token_ids, emitted)
        # If the drafter was not writing, the submitted tree contained all provisional tokens.
        is_left = self._stop_writing() and not self._session.is_finished
        self._provisional = self._provisional.after(emitted) if is_left else ProvisionalText()

    def _stop_writing(self) -> bool:
        """Let the drafter forget its text, and return whether it was writing."""
        if (writer := self._writer) is None:
            return False
        writer.stop()
        self._writer = None
        return True

    def _verified_text(self) -> "_GrowingText":
        """Return the text of the verified tokens."""
        text = _GrowingText(self._session, self.options.tokenizer)
        text.push(self._session.emitted)
        return text

    def _close(self) -> None:
        super()._close()
        if self._call is not None:  # it may be opening a session, which nobody would end
            self._call.add_done_callback(self._end_opened)

    def _end_opened(self, call: Future[Answer]) -> None:
        opened = None if call.exception() else call.result()
        if isinstance(opened, SessionOpened) and opened.session != self._session.session_id:
            self._link.end(opened.session)

    def _give_up(self, error: ResourceError) -> None:
        """End the text; its provisional tokens remain unverified."""
        self.counts.unverified = self._provisional.token_ids
        super()._give_up(error)


class _GrowingText:
    """Tokens and their text, up to the token at which the server would end the text."""

    def __init__(self, session: ClientSession, tokenizer: PreTrainedTokenizerBase | None) -> None:
        request = session.request
        self.has_ended = False
        self._text = None
        if tokenizer is not None:
            before = continued_tokens(request.prompt, session.prompt_token_ids)
            self._text = IncrementalText(tokenizer, request.stop, before=before)
        self._num_left = request.max_tokens
        self._end_ids = session.opened.end_ids if session.opened else []

    def push(self, token_ids: Sequence[int]) -> tuple[list[int], str]:
        """Return the tokens that belong to the text, and the text that they add."""
        taken, text = [], ""
        for token in token_ids:
            if self.has_ended:
                break
            taken.append(token)
            self._num_left -= 1
            self.has_ended = token in self._end_ids or self._num_left <= 0
            if self._text is not None:
                text += self._text.push(token)
                self.has_ended |= self._text.is_stopped
                text += self._text.flush() if self.has_ended else ""
        return taken, text


def _provisional_step(token_ids: list[int], text: str) -> RemoteStep:
    depths, proposers = [BONUS] * len(token_ids), [TARGET] * len(token_ids)
    return RemoteStep(
        token_ids, depths, False, proposer_ids=proposers, text=text, is_verified=False
    )
