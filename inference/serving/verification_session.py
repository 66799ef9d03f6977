"""A text whose trees are drafted on another machine, and verified here; without HTTP.

Only the target decides about tokens, with random numbers that depend on seed and step. The text is
therefore the one that the engine writes alone with the same trees, whatever is lost on the way.
"""

import torch
from transformers import PreTrainedTokenizerBase

from inference.engine.batch import DecodeBatch
from inference.engine.context import Context
from inference.engine.decode_step import DecodeStep
from inference.engine.policy import AlwaysDraft
from inference.engine.prefill import Prefill
from inference.engine.request import Request, SequenceState
from inference.remote.errors import MessageError
from inference.remote.messages import Progress, TreeLimits, Verdict
from inference.remote.received_tree import receive_tree
from inference.remote.step_book import Decision, StepBook
from inference.remote.step_frame import ReceivedStep, decode_step
from inference.serving.incremental_text import IncrementalText
from inference.serving.mailed_trees import MailedTrees
from jakiro.target.adapter import TargetAdapter


class VerificationSession(DecodeBatch):
    """The server's side of a session; not thread-safe.

    Args:
        target: frozen target.
        request: prompt, options and stop rule, which nothing else uses.
        tokenizer: the target's tokenizer.
        limits: largest tree.
        resume: text of an earlier session to go on with; None to begin.

    Raises:
        MessageError: the text to go on with is complete before its end, or not a text of the
            target's tokens.
    """

    def __init__(
        self,
        target: TargetAdapter,
        request: Request,
        tokenizer: PreTrainedTokenizerBase,
        limits: TreeLimits,
        resume: Progress | None = None,
    ) -> None:
        self._trees = MailedTrees(limits)
        self.limits = limits
        self.text = ""
        self._incremental = IncrementalText(tokenizer)
        self._state = SequenceState.of(0, request)
        self.book = StepBook(1 if resume is None else resume.next_step)
        context = Context(target, self._trees, request.sampling, 1, request.max_length)
        super().__init__(context, AlwaysDraft.with_all_of(self._trees))
        try:
            self._begin() if resume is None else self._resume(resume)
        except BaseException:
            self.close()
            raise

    @property
    def emitted(self) -> list[int]:
        """All tokens after the prompt."""
        return self._state.new_token_ids

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete."""
        return self._state.is_finished

    def submit(self, step: int, body: bytes) -> bytes:
        """Return the verdict of a submitted tree, which is decided once.

        Args:
            step: number of the step.
            body: bytes of the tree.

        Raises:
            MessageError: the bytes are not a tree below this text that can be verified; the step
                stays free.
            StepConflict: another tree was submitted for this step, or it is not this step's time.
            SessionGone: the session was closed.
            JakiroError: the target has failed; the session is closed.
        """
        received = decode_step(body)
        digest = received.header.digest
        if step == self.book.next_step and not self.book.is_finished and not self.book.is_gone:
            self._check_tree(received)
        decision = self.book.submit(step, digest)
        assert decision is not Decision.WAIT, "one thread submits"
        if decision is Decision.DECIDE:
            self.book.store(self._verdict(step, received), self.is_finished)
        assert self.book.last is not None
        return self.book.last.body

    def close(self) -> None:
        """Free the caches; all later submissions are refused."""
        self.book.close()
        self.live = []
        self.context.close()

    @torch.inference_mode()
    def _begin(self) -> None:
        """Read the prompt, and emit the first token."""
        prefill = self._read()
        (step,) = self._emit_all([self._state], prefill.select_first())
        self._publish(step)
        self.live = [] if step.finished else [self._state]

    @torch.inference_mode()
    def _resume(self, progress: Progress) -> None:
        """Read prompt and text; the last token becomes the root."""
        vocab = self.target.spec.vocab_size
        if wrong := [token for token in progress.emitted if token >= vocab]:
            raise _not_resumable(f"the token {wrong[0]}", f"ids below {vocab}")
        state = self._state
        for token in progress.emitted:
            if state.is_finished:
                raise _not_resumable("tokens after its end", "a text of this request")
            state.token_ids.append(token)
            state.is_finished = state.is_complete()
        self._add_text(progress.emitted)
        state.num_steps = progress.next_step - 1
        self.book.is_finished = state.is_finished
        if state.is_finished:
            return
        root = state.token_ids.pop()
        self._read()
        state.token_ids.append(root)
        self.live = [state]

    def _read(self) -> Prefill:
        prefill = Prefill(self.context, [self._state])
        while not prefill.is_complete:
            prefill.read_chunk()
        return prefill

    def _check_tree(self, received: ReceivedStep) -> None:
        """Check a tree for the next step before anything is decided."""
        expected = (len(self._state.token_ids) - 1, self._state.token_ids[-1])
        found = (received.header.base_length, received.header.root)
        if found != expected:
            raise MessageError(
                "other_text",
                "the tree belongs below another text",
                expected=f"token {expected[1]} at position {expected[0]}",
                got=f"token {found[1]} at position {found[0]}",
            )
        receive_tree(received.tree, self.limits, self.target.spec.vocab_size)

    def _verdict(self, step: int, received: ReceivedStep) -> bytes:
        """Verify a tree, and return the message about it."""
        self._trees.tree = received.tree
        try:
            (decoded,) = self.step()
        except BaseException:
            self.close()
            raise
        text = self._publish(decoded)
        verdict = Verdict(
            step=step,
            digest=received.header.digest,
            emitted=decoded.token_ids,
            num_accepted=sum(depth > 0 for depth in decoded.depths),
            text=text,
            finished=decoded.finished,
        )
        return verdict.model_dump_json().encode()

    def _publish(self, step: DecodeStep) -> str:
        """Return the text that a step adds.

        Raises:
            JakiroError: the step has failed.
        """
        if step.error is not None:
            self.close()
            raise step.error
        self.book.is_finished = step.finished
        return self._add_text(step.token_ids)

    def _add_text(self, token_ids: list[int]) -> str:
        text = "".join(self._incremental.push(token) for token in token_ids)
        if self.is_finished:
            text += self._incremental.flush()
        self.text += text
        return text


def _not_resumable(got: str, expected: str) -> MessageError:
    return MessageError("not_resumable", "the text cannot be continued", expected=expected, got=got)
