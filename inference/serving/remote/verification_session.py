"""A text whose trees are drafted on another machine, and verified here; without HTTP.

Only the target decides about tokens, with random numbers that depend on seed and step. The text is
therefore the one that the engine writes alone with the same trees, whatever is lost on the way.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from jaxtyping import UInt8
from transformers import PreTrainedTokenizerBase

from inference.engine.batch import DecodeBatch
from inference.engine.context import Context
from inference.engine.decode_step import DecodeStep
from inference.engine.policy import AlwaysDraft
from inference.engine.prefill import Prefill
from inference.engine.request import Request, SequenceState
from inference.engine.threads import num_threads
from inference.generation.incremental_text import IncrementalText
from inference.remote.errors import MessageError, SessionGone
from inference.remote.memory_rows import encode_with_rows
from inference.remote.messages import MemoryRows, Progress, TreeLimits, Verdict
from inference.remote.received_tree import receive_tree
from inference.remote.step_book import StepBook
from inference.remote.step_frame import ReceivedStep
from inference.serving.remote.mailed_trees import MailedTrees
from inference.serving.remote.memory_source import MAX_NEWEST_ROWS, MAX_ROWS, MemorySource
from jakiro.target.adapter import TargetAdapter


class VerificationSession(DecodeBatch):
    """The server's side of a session; not thread-safe.

    `read_chunk` must be called until the session is open.

    Args:
        request: prompt, options and stop rule, which nothing else uses.
        stops: strings that end the text, which the stop rule knows as well.

    Raises:
        MessageError: the text to continue is complete before its end, or has ids that are not
            tokens of the target.
    """

    def __init__(
        self,
        target: TargetAdapter,
        request: Request,
        tokenizer: PreTrainedTokenizerBase,
        limits: TreeLimits,
        resume: Progress | None = None,
        memory: MemorySource | None = None,
        *,
        stops: Sequence[str] = (),
        before: Sequence[int] = (),
        threads: int | None = None,
    ) -> None:
        self._memory = memory
        self._trees = MailedTrees(limits, () if memory is None else memory.hidden_states)
        self.limits = limits
        self.text = ""
        self._incremental = IncrementalText(tokenizer, stops, before=before)
        self._state = SequenceState.of(0, request)
        self._root: int | None = None  # last token of a text to continue, while it is read
        self.book = StepBook()
        self.verdict: Verdict | None = None
        if resume is not None:
            self._continue(resume, target.spec.vocab_size)
        self.is_open = self._state.is_finished
        context = Context(target, self._trees, request.sampling, 1, request.max_length)
        super().__init__(context, AlwaysDraft.with_all_of(self._trees), threads)
        self._prefill = Prefill(self.context, [self._state])
        if self.is_finished:
            self.context.close()

    @property
    def emitted(self) -> list[int]:
        """All tokens after the prompt."""
        return self._state.new_token_ids

    @property
    def length(self) -> int:
        """The number of tokens of prompt and text."""
        return len(self._state.token_ids)

    @property
    def sends_rows(self) -> bool:
        """Whether verdicts are frames with rows of memory, instead of JSON."""
        return self._memory is not None

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete."""
        return self._state.is_finished

    @torch.inference_mode()
    def read_chunk(self) -> None:
        """Read a chunk of the prompt, or of the text to continue.

        The last chunk opens the session; a text that begins gets its first token.
        """
        with self._closing(), num_threads(self.prefill_threads):
            self._prefill.read_chunk()
            if not self._prefill.is_complete:
                return
            if self._root is None:
                (step,) = self.emit_all([self._state], self._prefill.select_first([self._state]))
                self._publish(step)
            else:
                self._state.token_ids.append(self._root)
        self.live = [] if self.is_finished else [self._state]
        if self.is_finished:
            self.context.close()
        self.is_open = True

    def submit(self, step: int, received: ReceivedStep) -> bytes:
        """Return the verdict of a submitted tree, which is decided once.

        Raises:
            MessageError: the tree is not one below this text that can be verified; the step stays
                free.
            StepConflict: another tree was submitted for this step, or this is neither the next step
                nor the last one.
        """
        assert self.is_open or self.book.is_gone, "read the prompt first"
        digest = received.header.digest
        if step == self.book.next_step and not self.book.is_finished and not self.book.is_gone:
            self._check_tree(received)
        if self.book.submit(step, digest):
            self.book.store(digest, self._verdict(step, received), self.is_finished)
        assert self.book.last is not None
        return self.book.last.body

    @torch.inference_mode()
    def memory_rows(self, begin: int, end: int) -> bytes:
        """Return rows of the memory of verified tokens, encoded from the target's cache."""
        if self.book.is_gone:
            raise SessionGone
        length = 0 if self.is_finished or self._memory is None else len(self._state.token_ids) - 1
        if self._memory is None or not 0 <= begin < end <= min(length, begin + MAX_ROWS):
            raise MessageError(
                "memory_range",
                "there is no memory of these tokens",
                expected=f"at most {MAX_ROWS} positions from 0 to {length}",
                got=f"{begin} to {end}",
            )
        rows = self._memory.rows(self.context.cache, self._state.token_ids, begin, end)
        return encode_with_rows(MemoryRows(begin=begin), rows)

    def close(self) -> None:
        """Free the caches; all later submissions are refused."""
        self.book.close()
        self.live = []
        self.context.close()

    def _continue(self, progress: Progress, vocab_size: int) -> None:
        """Take over the tokens of an earlier session; the last one becomes the root."""
        if wrong := [token for token in progress.emitted if token >= vocab_size]:
            raise _not_resumable(f"the token {wrong[0]}", f"ids below {vocab_size}")
        state = self._state
        for token in progress.emitted:
            if state.is_finished:
                raise _not_resumable("tokens after its end", "a text of this request")
            state.token_ids.append(token)
            state.is_finished = state.is_complete()
        self._add_text(progress.emitted)
        state.num_steps = progress.next_step - 1
        self.book.next_step, self.book.is_finished = progress.next_step, state.is_finished
        if not state.is_finished:
            self._root = state.token_ids.pop()

    def _check_tree(self, received: ReceivedStep) -> None:
        """Check a tree for the next step before anything is decided."""
        expected = (len(self._state.token_ids) - 1, self._state.token_ids[-1])
        found = (received.header.base_length, received.header.root)
        if found != expected:
            raise MessageError(
                "other_text",
                "the tree continues another text",
                expected=f"token {expected[1]} at position {expected[0]}",
                got=f"token {found[1]} at position {found[0]}",
            )
        receive_tree(received.tree, self.limits, self.target.spec.vocab_size)

    def _verdict(self, step: int, received: ReceivedStep) -> bytes:
        """Verify a tree, and return the message about it."""
        self._trees.tree = received.tree
        with self._closing():
            with num_threads(self.threads):
                (decoded,) = self.step()
            text = self._publish(decoded)
            rows = self._newest_rows(received.header.base_length)
        self.verdict = verdict = Verdict(
            step=step,
            digest=received.header.digest,
            emitted=decoded.token_ids,
            num_accepted=sum(depth > 0 for depth in decoded.depths),
            text=text,
            finished=decoded.finished,
        )
        if decoded.finished:
            self.context.close()
        if rows is not None:
            return encode_with_rows(verdict, rows)
        return verdict.model_dump_json().encode()

    def _newest_rows(self, begin: int) -> UInt8[np.ndarray, "tokens bytes"] | None:
        """Return the rows from position `begin` on; None if the device reads no memory.

        A complete text needs no rows, and the device fetches the rows of many tokens later.
        """
        if self._memory is None:
            return None
        end = begin if self.is_finished else len(self._state.token_ids) - 1
        with torch.inference_mode():
            own = (self._state.token_ids, begin, min(end, begin + MAX_NEWEST_ROWS))
            return self._memory.rows(self.context.cache, *own)

    def _publish(self, step: DecodeStep) -> str:
        """Return the text that a step adds."""
        if step.error is not None:
            raise step.error
        self.book.is_finished = step.finished
        return self._add_text(step.token_ids)

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """Close the session if the block fails."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _add_text(self, token_ids: list[int]) -> str:
        text = "".join(self._incremental.push(token) for token in token_ids)
        if self.is_finished:
            text += self._incremental.flush()
        self.text += text
        return text


def _not_resumable(got: str, expected: str) -> MessageError:
    return MessageError("not_resumable", "the text cannot be continued", expected=expected, got=got)
