"""The decoding steps of a batch: draft, verify, accept and commit."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from inference.draft_tree import DraftTree
from inference.engine.acceptance import AcceptedTokens, AcceptResult, accept_trees
from inference.engine.context import Context
from inference.engine.decode_step import BONUS, TARGET, DecodeStep, Recorded, details_of
from inference.engine.policy import DraftPolicy, RunProgress
from inference.engine.prefill import Prefill
from inference.engine.request import OutputOptions, Request, SequenceState
from inference.protocol import AdaptiveSession, Budget
from inference.sampling.random_numbers import StepRandom
from jakiro.errors import RequestError

if TYPE_CHECKING:
    from inference.engine.captured import CapturedSteps


class DecodeBatch:
    """Sequences that are decoded together; a sequence that is complete or has failed leaves."""

    captured: "CapturedSteps | None" = None  # None if all steps are ordinary ones
    # whether the last tokens of the last sequences are needed afterwards
    commits_last: bool = False

    def __init__(
        self,
        context: Context,
        policy: DraftPolicy,
        threads: int | None = None,
        record: OutputOptions | None = None,
    ) -> None:
        self.context = context
        self.target, self.drafter = context.target, context.drafter
        self.policy = policy
        self.threads = threads
        self.record = record
        self.live: list[SequenceState] = []  # sequences with a first token, not complete yet
        self.num_steps = 0
        self.seconds: defaultdict[str, float] = defaultdict(float)
        most_nodes = self.drafter.max_nodes if self.drafter else 0
        self._num_uniforms = 1 + most_nodes  # most that a step needs

    def step(self) -> list[DecodeStep]:
        """Draft trees, verify them in one forward pass of the target, and emit accepted tokens."""
        if self.captured is not None and self.captured.can_step:
            return self.captured.step()
        return self._ordinary_step()

    @torch.inference_mode()
    def _ordinary_step(self) -> list[DecodeStep]:
        started = time.perf_counter()
        self.num_steps += 1
        for state in self.live:
            state.num_steps += 1
        random = StepRandom(
            [state.stream_key for state in self.live], self.target.device, self._num_uniforms
        )
        with self.clock("draft"):
            budget = self.next_budget()
            tree = self._draft(random, budget)
        with self.clock("verify"):
            logits = self._verify(tree)
        with self.clock("commit"):
            accepted = accept_trees(tree, logits, self.live, random)
            self.check(accepted.results)
            for state in self.live:
                state.stats.target_forwards += 1
            steps = self._advance(tree, accepted)
        self.learn(accepted.results, time.perf_counter() - started, budget)
        return steps

    @torch.inference_mode()
    def start(self, prefill: Prefill, sequences: Sequence[SequenceState]) -> list[DecodeStep]:
        """Emit the first token of each sequence, and let incomplete sequences join the batch.

        If there is an exception, such as one of memory, none of the sequences joins.

        Args:
            prefill: complete prefill of the prompts. Its context is closed, unless it is that of
                the batch.
        """
        context, is_own = prefill.context, prefill.context is self.context
        try:
            results = prefill.select_first(sequences)
            self.check(results)
            steps = self.emit_all(sequences, results)
            if is_own:
                self.live += sequences
                self.retire()
            else:
                _notify_finished(context, sequences)
                places = [place for place, state in enumerate(sequences) if not state.is_finished]
                if 1 < len(context.lengths) > len(places):
                    context.select_sequences(places)
                joining = [sequences[place] for place in places]
                if joining and self.captured is not None:
                    self.captured.discard_step()
                self._join(context, joining)
        finally:
            if not is_own:
                context.close()
        return steps

    def _join(self, context: Context, sequences: Sequence[SequenceState]) -> None:
        """Append all sequences, or none of them if there is an exception.

        Args:
            context: context of these sequences, or of a single prompt that all of them continue.
        """
        if not sequences:
            return
        count = len(self.live)
        are_alone = len(context.lengths) == len(sequences)
        groups = [sequences] if are_alone else [[state] for state in sequences]
        try:
            for number, together in enumerate(groups):
                if number > 0:
                    context.branch(together[0].request.sampling)
                self.append(context, together)
        except BaseException:
            self.live = self.live[:count]
            self.context.select_sequences(range(count))
            raise

    @torch.inference_mode()
    def append(self, context: Context, sequences: Sequence[SequenceState]) -> None:
        if not self.live:  # the context may still contain the last sequence
            self.context.select_sequences([])
        for batch, states in ((self.context, self.live), (context, sequences)):
            if batch.session is not None and states:
                batch.catch_up([state.token_ids for state in states])
        self.context.append_sequences(context)
        self.live += sequences

    @property
    def prefill_threads(self) -> int | None:
        """The number of threads that read prompts; None for torch's current number.

        Prompts are read with all threads, unless the target is batch-invariant: the number of
        threads may affect rounding.
        """
        return self.threads if self.target.modules.is_batch_invariant else None

    @property
    def is_pausing(self) -> bool:
        """Whether no step may start before the one under way has been read."""
        return any(state.is_finished for state in self.live)

    def check(self, results: Sequence[AcceptResult]) -> None:
        """Check the outcomes of a step before any token is emitted."""

    def learn(
        self, results: Sequence[AcceptResult], seconds: float | None, budget: Budget | None
    ) -> None:
        sound = [result for result in results if result.error is None]
        if sound:
            trees, paths = [result.tree for result in sound], [result.path for result in sound]
            self.policy.learn(trees, paths, seconds, budget)

    def next_budget(self) -> Budget | None:
        drafts = any(state.request.drafts for state in self.live)
        return self.policy.next_budget(self._progress()) if drafts else None

    def _progress(self) -> RunProgress:
        left = max(state.request.max_length - len(state.token_ids) for state in self.live)
        return RunProgress(self.context.num_unread, left)

    def _draft(self, random: StepRandom, budget: Budget | None) -> DraftTree:
        drafts = [state.request.drafts for state in self.live]
        if budget is None or self.context.session is None:
            return DraftTree.empty(self.context.base_length)
        tokens = [state.token_ids for state in self.live]
        tree = self._proposed(tokens, budget, random)
        last = self.target.spec.max_position - 1
        if max(self.context.lengths) + tree.max_depth > last:
            tree = tree.limited(last)
        if not all(drafts):
            tree = tree.without(index for index, is_drafted in enumerate(drafts) if not is_drafted)
        return tree

    def _proposed(
        self, token_ids: Sequence[list[int]], budget: Budget, random: StepRandom
    ) -> DraftTree:
        grammars = [state.request.sampling.grammar for state in self.live]
        return self.context.propose(token_ids, budget, random, grammars if any(grammars) else ())

    def _verify(self, tree: DraftTree) -> Float[Tensor, "batch queries vocab"]:
        tokens = [state.token_ids for state in self.live]
        return self.target.logits(self.context.verify(tree, tokens))

    def _advance(self, tree: DraftTree, accepted: AcceptedTokens) -> list[DecodeStep]:
        """Emit accepted tokens, make these tokens permanent, and remove complete sequences."""
        steps = self.emit_all(self.live, accepted.results)
        # Without later steps, nothing has to be committed.
        if self.commits_last or not all(step.finished for step in steps):
            self.context.commit(tree, accepted, [len(step.token_ids) for step in steps])
        self.retire()
        return steps

    def retire(self) -> None:
        """Remove complete sequences, after an adaptive session has learned from them as a whole."""
        _notify_finished(self.context, self.live)
        self._keep([not state.is_finished for state in self.live])

    def _keep(self, is_kept: Sequence[bool]) -> None:
        still = remaining(is_kept)
        if len(still) < len(is_kept):
            self._select(still)
        self.live = [self.live[index] for index in still]

    def _select(self, indices: Sequence[int]) -> None:
        if self.captured is not None:
            self.captured.stop()
        self.context.select_sequences(indices)

    def record_of(self, request: Request) -> OutputOptions | None:
        return request.record or self.record

    def emit_all(
        self, states: Sequence[SequenceState], results: Sequence[AcceptResult]
    ) -> list[DecodeStep]:
        pairs = zip(states, results, strict=True)
        steps = [self._emit(state, result) for state, result in pairs]
        recorded = {
            index: Recorded(record, result, step.token_ids)
            for index, (state, result, step) in enumerate(zip(states, results, steps, strict=True))
            if (record := self.record_of(state.request)) is not None and step.token_ids
        }
        if recorded:
            for index, details in zip(recorded, details_of(list(recorded.values())), strict=True):
                steps[index] = replace(steps[index], details=details)
        return steps

    def _emit(self, state: SequenceState, result: AcceptResult) -> DecodeStep:
        """Append accepted tokens and the next token, one by one, until the request is complete."""
        if result.error is not None:
            state.is_finished, state.error = True, result.error
            return DecodeStep([], [], True, state.index, error=result.error)
        tree = result.tree
        drafted = [(tree.token_ids[n], tree.depth[n], tree.proposer_id[n]) for n in result.path]
        emitted: list[int] = []
        depths: list[int] = []
        proposers: list[int] = []
        finished = False
        for token, depth, proposer in [*drafted, (result.next_token, BONUS, TARGET)]:
            state.token_ids.append(token)
            emitted.append(token)
            depths.append(depth)
            proposers.append(proposer)
            try:
                finished = state.is_complete()
            except RequestError as error:
                finished, state.error = True, error
            if finished:
                break
        state.is_finished = finished
        state.stats.count(tree, result.path, len(emitted))
        return DecodeStep(
            emitted, depths, finished, state.index, proposer_ids=proposers, error=state.error
        )

    @contextmanager
    def clock(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - started


def _notify_finished(context: Context, sequences: Sequence[SequenceState]) -> None:
    if not isinstance(context.session, AdaptiveSession):
        return
    is_single = len(context.lengths) == 1  # several sequences may continue one prompt
    for index, state in enumerate(sequences):
        if state.is_finished and state.error is None:
            context.session.on_finished(0 if is_single else index, state.token_ids)


def remaining(is_live: Sequence[bool]) -> list[int]:
    """Return the indices of live sequences in their new order.

    The last live sequences move into the gaps. All other sequences keep their index, so that few
    caches are copied.
    """
    count = sum(is_live)
    moving = [index for index in range(count, len(is_live)) if is_live[index]]
    return [index if is_live[index] else moving.pop() for index in range(count)]
