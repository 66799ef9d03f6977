"""A text that continues without a connection: provisional at first, and then verified.

sent, no answer for some seconds --> written alone, token by token, until the answer or the limit
verdict of the submitted tree    --> what continues it is the next step's tree
verdict of that tree             --> tokens up to the first difference stay, and drafting continues

    verified text, root | guess | sampled one by one
                          ^ path of the submitted tree, which may turn out to be wrong

The guess is a path of the tree that was submitted before the connection was lost. What follows it
is drafted token by token, each from a distribution that is kept with it, with random numbers that
nothing else uses. The verdict of the submitted tree comes first. If the provisional text begins
with all of its tokens, the rest is submitted as the chain of the next step, and the target decides
how much of it stays. A token after the guess was sampled independently of whether the guess was
right, so the text follows the target's distribution.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from inference.device.drafting import DeviceDrafting, exported_folder
from inference.device.text import Answer, RemoteOutput, RemoteStep, RemoteText
from inference.draft_tree import ROOT, CandidateKind, SequenceTree
from inference.drafters.base import TokenSession
from inference.drafters.names import LM
from inference.drafters.trained.chain import TrainedChain
from inference.drafters.trained.drafter import TrainedSession
from inference.engine.decode_step import BONUS, TARGET
from inference.generation.incremental_text import IncrementalText
from inference.generation.prompts import continued_tokens
from inference.protocol import Budget
from inference.remote.text_state import ClientSession
from inference.remote.tree_frame import TreeTensors, integer_distribution, to_draft_tree
from inference.sampling.random_numbers import StepRandom, StreamKey
from jakiro.utils.logs import quiet_libraries
from jakiro.utils.pretrained import load_tokenizer
from jakiro.utils.progress import in_background
from jakiro.utils.token_text import common_length

_ALONE = 2  # stream of random numbers, besides those that accept and draft in a decoding step


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
        model = name.removeprefix(f"{LM}=")
        folder = exported_folder(name) if model == name else model
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

    def output(self) -> OfflineOutput:
        self.counts.unverified = self._provisional.token_ids if self.error else []
        return OfflineOutput(**vars(super().output()), provisional=self.counts)

    def _await_answer(self, ask: Callable[[], Answer]) -> Generator[RemoteStep, None, Answer]:
        """Return the answer to a request, and yield what is written alone until it arrives."""
        if not self._session.emitted:
            return (yield from super()._await_answer(ask))
        call = in_background(ask)
        with self._clock("verify"):
            wait([call], 0.0 if self._writer else self.options.after_seconds)
        if not call.done():
            yield from self._write_alone(call)
            with self._clock("verify"):
                wait([call])
        return call.result()

    def _write_alone(self, call: Future[Answer]) -> Iterator[RemoteStep]:
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
        shown = self._provisional.token_ids  # part of the submitted tree, if there is one
        new, text = list[int](), ""
        if self._tree is None:
            self._text.push(shown)
        else:
            path = [self._tree.token_ids[node] for node in self._tree.best_path()]
            guess, _ = self._text.push(path[: len(shown)])
            new, text = self._text.push(path[len(shown) :])
            self._provisional = ProvisionalText([*guess, *new])
        left = session.request.max_tokens - len(session.emitted)
        self._most = min(self.options.max_tokens, session.opened.limits.max_chain, left)
        self._num_attempts += 1
        self._writer = AloneWriter(
            self._local_drafting,
            session.token_ids,
            session.next_step,
            self._num_attempts,
            self._most,
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
        self._submit(self._provisional.chain(self._local_drafting.limits.max_chain))

    def _apply(self, answer: Answer) -> Iterator[RemoteStep]:
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
        text = _GrowingText(self._session, self.options.tokenizer)
        text.push(self._session.emitted)
        return text


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


class ProvisionalToken(NamedTuple):
    """A token that was written alone, with the distribution that it was sampled from."""

    token_id: int
    ids: tuple[int, ...] = ()  # empty if the token was selected without sampling
    weights: tuple[int, ...] = ()  # integer weights of these ids

    @classmethod
    def of(cls, tree: SequenceTree) -> "ProvisionalToken | None":
        """Return the only candidate of a tree; None if there is none."""
        if not tree.children:
            return None
        token_id = tree.token_ids[tree.children[ROOT][0]]
        if not tree.sampled:
            return cls(token_id)
        ids, weights = integer_distribution(tree, ROOT)
        return cls(token_id, tuple(ids[weights > 0].tolist()), tuple(weights[weights > 0].tolist()))


class ProvisionalText:
    """The provisional tokens after the root.

    Args:
        guess: tokens that the submitted tree may turn out to emit; none if there is no such tree.
    """

    def __init__(self, guess: Sequence[int] = (), written: Sequence[ProvisionalToken] = ()) -> None:
        self.guess = list(guess)
        self.written = list(written)

    @property
    def token_ids(self) -> list[int]:
        return [*self.guess, *(token.token_id for token in self.written)]

    def after(self, emitted: Sequence[int]) -> "ProvisionalText":
        """Return the provisional text after the tokens of the submitted tree's verdict.

        It is empty unless the verdict emits the whole guess and the token that was written after
        it, and contains only tokens that were written alone.
        """
        count = len(emitted)
        if count <= len(self.guess) or self.token_ids[:count] != list(emitted):
            return ProvisionalText()
        return ProvisionalText(written=self.written[count - len(self.guess) :])

    def chain(self, longest: int) -> SequenceTree:
        """Return the written tokens as a draft tree with a single path."""
        assert not self.guess, "the submitted tree comes first"
        written = self.written[:longest]
        sampled = [index for index, token in enumerate(written) if token.weights]
        kinds = np.full(len(written), int(CandidateKind.DETERMINISTIC), np.uint8)
        kinds[sampled] = int(CandidateKind.SAMPLED)
        tensors = TreeTensors(
            np.array([token.token_id for token in written], np.int32),
            np.arange(len(written), dtype=np.int16) - 1,  # the first one is below the root
            kinds,
            np.array(sampled, np.int16) - 1,
            _pad([written[index].ids for index in sampled]).astype(np.int32),
            _pad([written[index].weights for index in sampled]).astype(np.uint16),
        )
        return to_draft_tree(tensors, torch.zeros(1, dtype=torch.long)).sequence_tree()


class AloneWriter:
    """Provisional tokens after verified ones, from the session of the drafter.

    Args:
        attempt: number of times that this text has been continued alone, including this time.
        most: largest number of tokens.
    """

    @torch.inference_mode()
    def __init__(
        self,
        drafting: DeviceDrafting,
        token_ids: Sequence[int],
        step: int,
        attempt: int,
        most: int,
    ) -> None:
        self._drafting = drafting
        self._verified = list(token_ids)
        self._step_key = drafting.sampling.stream_key(step)
        self._attempt = attempt
        self._count = 0
        self._chain: TrainedChain | None = None
        self._unread: list[int] = []  # verified tokens after the root of the chain
        if not isinstance(drafting.session, TrainedSession):
            drafting.advance(self._verified)
            return
        # The path begins at the last token before which all memory is here. If this token is far
        # back, as without the memory of the prompt, the drafter would write nonsense.
        root = drafting.num_readable
        self._unread = self._verified[root + 1 :]
        if root > 0 and len(self._unread) <= drafting.limits.largest:
            drafting.advance(self._verified[: root + 1])
            self._chain = TrainedChain(drafting.session, len(self._unread) + most)

    @torch.inference_mode()
    def next(self, provisional: Sequence[int]) -> ProvisionalToken | None:
        """Return a token after provisional ones; None if the drafter has none."""
        session = self._drafting.session
        if session is None or isinstance(session, TokenSession):  # it finds text, and may learn
            return None
        self._count += 1
        key = alone_key(self._step_key, self._attempt, self._count)
        random = StepRandom([key], self._drafting.device)
        if not isinstance(session, TrainedSession):
            self._drafting.advance([*self._verified, *provisional])
            return ProvisionalToken.of(session.propose(Budget(1, 1), random).sequence_tree())
        if self._chain is None:
            return None
        tree = self._chain.propose([*self._unread, *provisional], random).sequence_tree()
        token = ProvisionalToken.of(tree)
        if token is None:
            self._chain = None  # it cannot be asked twice about the same tokens
        return token

    def stop(self) -> None:
        """Let the drafter forget the provisional tokens, as far as it has stored them."""
        self._drafting.rollback(len(self._verified) - 1)


def alone_key(step_key: StreamKey, attempt: int, number: int) -> StreamKey:
    """Return the key of the random numbers of a provisional token, which nothing else uses.

    Whether earlier provisional tokens were kept depends on their random numbers, so these numbers
    must not select other candidates.

    Args:
        attempt: number of times that the device has begun to write alone in this text.
    """
    return (*step_key, _ALONE, attempt, number)


def _pad(rows: Sequence[Sequence[int]]) -> np.ndarray:
    width = max(map(len, rows), default=0)
    padded = [[*row, *[0] * (width - len(row))] for row in rows]
    return np.array(padded).reshape(len(rows), width)
