"""A text whose trees are drafted on another machine, and verified here; without HTTP.

Only the target decides about tokens, with random numbers that depend on seed and step. The text is
therefore the one that the engine writes alone with the same trees, whatever is lost on the way.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import UInt8
from transformers import PreTrainedTokenizerBase

from inference.draft_tree import DraftTree
from inference.drafters.base import TokenDrafter
from inference.drafters.trained.drafter import TrainedDrafter
from inference.drafters.trained.memory import (
    encoder_fingerprint,
    memory_drafter,
    row_dtype,
    row_format,
)
from inference.engine.batch import DecodeBatch
from inference.engine.context import Context
from inference.engine.decode_step import DecodeStep
from inference.engine.policy import AlwaysDraft
from inference.engine.prefill import Prefill
from inference.engine.request import Request, SequenceState
from inference.generation.incremental_text import IncrementalText
from inference.protocol import Budget, Drafter
from inference.remote.memory_rows import MAX_ROWS, encode_with_rows
from inference.remote.messages import (
    MemoryOffer,
    MemoryRequest,
    MemoryRows,
    MessageError,
    Progress,
    TreeLimits,
    Verdict,
)
from inference.remote.text_state import VerdictLog
from inference.remote.tree_frame import ReceivedStep, receive_tree, to_draft_tree
from inference.sampling.random_numbers import StepRandom
from jakiro.target.adapter import TargetAdapter
from jakiro.target.cache import SlotCache
from jakiro.target.step import StepOutput, chain_step
from jakiro.utils.devices import num_threads

MAX_NEWEST_ROWS = 64  # largest number of rows with a verdict


class MemorySource:
    """Encodes the memory that a device asks for."""

    def __init__(self, drafter: TrainedDrafter, request: MemoryRequest) -> None:
        self._drafter = drafter
        self.hidden_states = drafter.hidden_states
        self._format = row_format(drafter.model, row_dtype(drafter.model), request.encoding)

    def rows(
        self, cache: SlotCache, token_ids: Sequence[int], begin: int, end: int
    ) -> UInt8[np.ndarray, "tokens bytes"]:
        """Return the rows of cached tokens.

        Args:
            cache: the target's cache of one sequence, which may be closed if `begin == end`.
        """
        if begin == end:
            return np.empty((0, self._format.num_bytes), np.uint8)
        target = self._drafter.target
        step = chain_step(torch.tensor([list(token_ids[begin:end])], device=target.device), begin)
        nothing = torch.empty(*step.slots.shape, 0, device=target.device)  # no features
        return self._format.encode(
            self._drafter.encode_memory(StepOutput(nothing, step, cache)).tensors
        )


class DecidedStep(NamedTuple):
    body: bytes
    has_rows: bool  # whether the body is a frame with rows of memory, instead of JSON
    verdict: Verdict | None = None  # None if it was stored already


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
        self.limits = limits
        self.text = ""
        self.verdicts = VerdictLog()
        self.is_closed = False
        self._memory = memory
        self._incremental = IncrementalText(tokenizer, stops, before=before)
        self._state = SequenceState.of(0, request)
        self._root: int | None = None  # last token of a text to continue, while it is read
        self._received: ReceivedStep | None = None  # the tree that is being verified
        if resume is not None:
            self._continue(resume, target.spec.vocab_size)
        self.is_open = self._state.is_finished
        sizes = TokenDrafter("", limits.largest, limits.largest)  # it drafts nothing
        sizes.hidden_states = () if memory is None else memory.hidden_states
        context = Context(target, sizes, request.sampling, 1, request.max_length)
        super().__init__(context, AlwaysDraft(None), threads)
        self._prefill = Prefill(self.context, [self._state])
        if self.is_finished:
            self.context.close()

    @property
    def emitted(self) -> list[int]:
        """All tokens after the prompt."""
        return self._state.new_token_ids

    @property
    def is_finished(self) -> bool:
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

    @torch.inference_mode()
    def submit(self, step: int, received: ReceivedStep) -> DecidedStep:
        """Return the verdict of a submitted tree, which is decided once.

        Raises:
            MessageError: the tree is not one below this text that can be verified, another tree was
                submitted for this step, or this is neither the next step nor the last one; nothing
                has been decided.
        """
        self._check_open()
        digest = received.header.digest
        if (stored := self.verdicts.verdict_of(step, digest)) is not None:
            return DecidedStep(stored, self._memory is not None)
        self._check_tree(received)
        decided = self._decide(step, received)
        self.verdicts.store(digest, decided.body, self.is_finished)
        return decided

    @torch.inference_mode()
    def memory_rows(self, begin: int, end: int) -> bytes:
        """Return rows of the memory of verified tokens, encoded from the target's cache."""
        self._check_open()
        length = 0 if self.is_finished or self._memory is None else len(self._state.token_ids) - 1
        if self._memory is None or not 0 <= begin < end <= min(length, begin + MAX_ROWS):
            raise MessageError("memory_range", "there is no memory of these tokens")
        rows = self._memory.rows(self.context.cache, self._state.token_ids, begin, end)
        return encode_with_rows(MemoryRows(begin=begin), rows)

    def close(self) -> None:
        """Free the caches; all later requests are refused."""
        self.is_closed = True
        self.live = []
        self.context.close()

    def _check_open(self) -> None:
        assert self.is_open or self.is_closed, "read the prompt first"
        if self.is_closed:
            raise gone()

    def _continue(self, progress: Progress, vocab_size: int) -> None:
        """Take over the tokens of an earlier session; the last one becomes the root."""
        state = self._state
        for token in progress.emitted:
            if token >= vocab_size or state.is_finished:
                raise MessageError("not_resumable", "the text cannot be continued")
            state.token_ids.append(token)
            state.is_finished = state.is_complete()
        self._add_text(progress.emitted)
        state.num_steps = progress.next_step - 1
        self.verdicts.next_step, self.verdicts.is_finished = progress.next_step, state.is_finished
        if not state.is_finished:
            self._root = state.token_ids.pop()

    def _check_tree(self, received: ReceivedStep) -> None:
        """Check a tree for the next step before anything is decided."""
        token_ids, header = self._state.token_ids, received.header
        if (header.base_length, header.root) != (len(token_ids) - 1, token_ids[-1]):
            raise MessageError("other_text", "the tree continues another text")
        receive_tree(received.tree, self.limits, self.target.spec.vocab_size)

    def _decide(self, step: int, received: ReceivedStep) -> DecidedStep:
        """Verify a tree, and return the message about it."""
        self._received = received
        with self._closing():
            with num_threads(self.threads):
                (decoded,) = self.step()
            verdict = Verdict(
                step=step,
                digest=received.header.digest,
                emitted=decoded.token_ids,
                num_accepted=sum(depth > 0 for depth in decoded.depths),
                text=self._publish(decoded),
                finished=decoded.finished,
            )
            body = self._encoded(verdict, received.header.base_length)
        if decoded.finished:
            self.context.close()
        return DecidedStep(body, self._memory is not None, verdict)

    def _draft(self, random: StepRandom, budget: Budget | None) -> DraftTree:
        """Return the tree of the other machine, as far as the target has positions for it."""
        assert self._received is not None, "only `submit` begins a step"
        tree = to_draft_tree(self._received.tree, self.context.base_length)
        return tree.limited(self.target.spec.max_position - 1)

    def _encoded(self, verdict: Verdict, begin: int) -> bytes:
        """Return a verdict, with the rows of memory from position `begin` on if there is a memory.

        A complete text needs no rows, and the device fetches the rows of many tokens later.
        """
        if self._memory is None:
            return verdict.model_dump_json().encode()
        token_ids = self._state.token_ids
        end = begin if self.is_finished else min(len(token_ids) - 1, begin + MAX_NEWEST_ROWS)
        rows = self._memory.rows(self.context.cache, token_ids, begin, end)
        return encode_with_rows(verdict, rows)

    def _publish(self, step: DecodeStep) -> str:
        """Return the text that a step adds."""
        if step.error is not None:
            raise step.error
        self.verdicts.is_finished = step.finished
        return self._add_text(step.token_ids)

    @contextmanager
    def _closing(self) -> Iterator[None]:
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


def gone() -> MessageError:
    """Return the error for a session that has ended, or that another user has or nobody."""
    return MessageError("session_gone", "there is no such session, or no more", status=410)


def memory_offer(drafter: Drafter | None) -> MemoryOffer | None:
    """Return the memory that a server can encode; None if its drafter has none for a device."""
    encoding = memory_drafter(drafter)
    if encoding is None:
        return None
    encoder, dtype = encoder_fingerprint(encoding.model), row_dtype(encoding.model)
    return MemoryOffer(encoder=encoder, dtype=dtype)


def memory_source(
    drafter: Drafter | None, offer: MemoryOffer | None, request: MemoryRequest | None
) -> MemorySource | None:
    if request is None:
        return None
    encoding = memory_drafter(drafter)
    if encoding is None or offer is None or request.encoder != offer.encoder:
        raise MessageError(
            "other_encoder",
            "the drafter of this machine is another one than the server's, which cannot encode the "
            "memory for it",
            remedy="export the drafter that the server was started with",
        )
    return MemorySource(encoding, request)
