"""The decode loop: prefill, then draft, verify, accept and commit until requests are complete."""

import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from inference.draft_tree import DraftTree
from inference.engine.acceptance import AcceptedTokens, AcceptResult, accept_trees
from inference.engine.context import Context
from inference.engine.details import OutputOptions, TokenDetails, details_of
from inference.engine.policy import AlwaysDraft, DraftPolicy
from inference.engine.prefill import Prefill
from inference.engine.request import Request, SequenceState
from inference.engine.stats import DecodeStats
from inference.engine.threads import num_threads
from inference.engine.tree_step import tree_step
from inference.protocol import AdaptiveSession, Drafter, VerifyResult
from inference.sampling.random_numbers import StepRandom
from jakiro.errors import PromptError
from jakiro.target.adapter import TargetAdapter

BONUS = 0  # depth of a bonus or recovered token, which comes from the target itself


@dataclass(frozen=True)
class DecodeStep:
    """The tokens that one decoding step emitted for one sequence."""

    token_ids: list[int]
    depths: list[int]  # depth of each token in the draft tree, or BONUS
    finished: bool
    index: int = 0  # index of the request in the run
    details: TokenDetails | None = None  # None if no details were requested
    autoregressive_seconds: float = 0.0  # estimate for these tokens without drafts; 0 if unknown


class DecodeRun:
    """Requests that are decoded together; iteration yields first tokens, then decoding steps.

    Further requests may be admitted at any time. Each sequence gets the same tokens as alone, up to
    rounding, unless the drafter or the policy learns from requests.

    Args:
        target: frozen target.
        drafter: drafter of the trees; None for autoregressive decoding.
        requests: one request or several requests. With a drafter, their tokens must be selected in
            the same way.
        policy: policy that decides when and how much to draft; None to draft in every step, as much
            as the drafter allows.
        context: context of an earlier chat turn, for a run with a single request. The context
            remains open at the end of the run. None for a new context.
        record: details to return for each token; None to return none.
        threads: number of threads that decoding steps compute with on a CPU; None for torch's
            current number.
    """

    def __init__(
        self,
        target: TargetAdapter,
        drafter: Drafter | None,
        requests: Request | Sequence[Request],
        policy: DraftPolicy | None = None,
        context: Context | None = None,
        record: OutputOptions | None = None,
        threads: int | None = None,
    ) -> None:
        several = [requests] if isinstance(requests, Request) else list(requests)
        self.target = target
        self.drafter = drafter
        self.sampling = several[0].sampling
        self.sequences: list[SequenceState] = []
        self.live: list[SequenceState] = []  # sequences with a first token, not complete yet
        self.draft_policy = policy or AlwaysDraft.with_all_of(drafter)
        self.policy = self.draft_policy.new_run(self.sampling, len(several))
        self.record = record
        self.threads = threads
        self.is_context_lent = context is not None
        self.num_steps = 0
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.is_closed = False
        self._num_uniforms = 1 + (drafter.max_nodes if drafter else 0)  # most that a step needs
        first = self._added(several)
        self.context = context or self._new_context(first, longest_of(first))
        self.context.reserve(longest_of(first))
        self._waiting: list[SequenceState] = []
        self._prefill: Prefill | None = Prefill(self.context, first)

    @property
    def token_ids(self) -> list[int]:
        """The prompt and continuation of the first request."""
        return self.sequences[0].token_ids

    @property
    def stats(self) -> DecodeStats:
        """The summed counts of all requests, and the times of the run in seconds."""
        total = DecodeStats.pooled(state.stats for state in self.sequences)
        total.seconds.update(self.seconds)
        return total

    def __iter__(self) -> Generator[list[DecodeStep], None, None]:
        """Yield the first tokens of sequences, and the tokens of each decoding step.

        The first item contains the first tokens of the requests with which the run was created.
        """
        try:
            while not self.is_closed and (self.live or self._prefill or self._waiting):
                started = time.perf_counter()
                steps = self._next_steps()
                self.seconds["total"] += time.perf_counter() - started
                if steps:
                    yield steps
        finally:
            self.close()

    def _next_steps(self) -> list[DecodeStep]:
        """Read prompts or decode; return nothing if a prompt has been read only in part."""
        steps = self._read_prompts()
        if not steps and self.live:
            with num_threads(self.threads):
                steps = self._step()
        return steps

    def admit(self, requests: Sequence[Request]) -> list[int]:
        """Add requests to the run, and return their indices.

        The prompts of these requests are read in chunks, between decoding steps of the other
        sequences.

        Args:
            requests: requests, which may select tokens in different ways. With a drafter, their
                trees must have the shape of the first requests' trees (see `Drafter.can_share`).

        Raises:
            PromptError: the run is closed or belongs to a conversation, or the drafter has other
                trees for these requests.
        """
        if self.is_closed or self.is_context_lent:
            raise PromptError(
                "the run cannot admit requests",
                expected="a run that is not closed, outside a conversation",
                got="a closed run" if self.is_closed else "a run of a conversation",
                remedy="start another run",
            )
        own, drafter = self.sampling, self.drafter
        others = [
            request.sampling
            for request in requests
            if drafter is not None and not drafter.can_share(own, request.sampling)
        ]
        if others:
            raise PromptError(
                "the trees of requests that select tokens in different ways differ in shape",
                expected=f"tokens selected as by {own}, or with trees of the same shape",
                got=str(others[0]),
                remedy="start another run for these requests, or decode without a drafter",
            )
        added = self._added(requests)
        self._waiting += added
        return [state.index for state in added]

    def forget(self, index: int) -> None:
        """Free the tokens of a complete sequence; its counts remain part of `stats`.

        Args:
            index: index of the request.
        """
        state = self.sequences[index]
        state.token_ids, state.request = [], replace(state.request, token_ids=[])

    def finish(self) -> "DecodeRun":
        """Decode to the end, and return the run with its tokens and statistics."""
        for _ in self:
            pass
        return self

    def close(self) -> None:
        """Free the caches, unless the context was passed in; keep the tokens and statistics."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._prefill is not None and self._prefill.context is not self.context:
            self._prefill.context.close()
        self._prefill, self._waiting, self.live = None, [], []
        for state in self.sequences:
            for ticket in state.request.tickets:
                ticket.end()
        self._release_context()

    def _release_context(self) -> None:
        """Free the caches of a context that was not passed in."""
        if not self.is_context_lent:
            self.context.close()

    def _added(self, requests: Sequence[Request]) -> list[SequenceState]:
        first = len(self.sequences)
        added = [SequenceState.of(first + index, request) for index, request in enumerate(requests)]
        self.sequences += added
        return added

    def _new_context(self, sequences: Sequence[SequenceState], capacity: int) -> Context:
        sampling = sequences[0].request.sampling
        return Context(self.target, self.drafter, sampling, len(sequences), capacity)

    @torch.inference_mode()
    def _read_prompts(self) -> list[DecodeStep]:
        """Read a chunk of new prompts; return the first tokens after the last chunk."""
        if self._prefill is None and self._waiting:
            newcomers = self._alike(self._waiting)
            self._waiting = self._waiting[len(newcomers) :]
            longest_prompt = max(len(state.token_ids) for state in newcomers)
            self._prefill = Prefill(self._new_context(newcomers, longest_prompt), newcomers)
        if self._prefill is None:
            return []
        # Prompts are read with all threads, unless the target is batch-invariant: the number of
        # threads may affect rounding.
        threads = self.threads if self.target.modules.is_batch_invariant else None
        with self._clock("prefill"), num_threads(threads):
            self._prefill.read_chunk()
            if not self._prefill.is_complete:
                return []
            prefill, self._prefill = self._prefill, None
            return self._start(prefill)

    def _alike(self, sequences: list[SequenceState]) -> list[SequenceState]:
        """Return the first sequences whose tokens are selected alike; all without a drafter."""
        if self.drafter is None:
            return sequences
        first = sequences[0].request.sampling.description
        each = enumerate(state.request.sampling.description for state in sequences)
        end = next((index for index, own in each if own != first), len(sequences))
        return sequences[:end]

    def _start(self, prefill: Prefill) -> list[DecodeStep]:
        """Emit the first tokens of sequences, which become part of the batch."""
        results = prefill.select_first()
        pairs = zip(prefill.sequences, results, strict=True)
        steps = [self._emit(state, result) for state, result in pairs]
        if prefill.context is not self.context:
            self._merge(prefill)
        num_others = len(self.live)
        self.live += prefill.sequences
        self._retire([*[False] * num_others, *(step.finished for step in steps)])
        return steps

    def _merge(self, prefill: Prefill) -> None:
        """Add sequences whose prompts have been read to the context of the live sequences."""
        if self.live:
            self._append(prefill)
        else:
            self.context.close()
            self.context = prefill.context
        self.context.reserve(longest_of(prefill.sequences))

    def _append(self, prefill: Prefill) -> None:
        for context, sequences in ((self.context, self.live), (prefill.context, prefill.sequences)):
            if context.session is not None:
                context.catch_up([state.token_ids for state in sequences])
        self.context.append_sequences(prefill.context)
        prefill.context.close()

    @torch.inference_mode()
    def _step(self) -> list[DecodeStep]:
        """Draft trees, verify them in one forward pass of the target, and emit accepted tokens."""
        started = time.perf_counter()
        self.num_steps += 1
        for state in self.live:
            state.num_steps += 1
        random = StepRandom(
            [state.stream_key for state in self.live], self.target.device, self._num_uniforms
        )
        with self._clock("draft"):
            tree = self._draft(random)
        with self._clock("verify"):
            roots = self.context.roots([state.token_ids for state in self.live])
            step = tree_step(tree, roots, self.target.spec, max(self.context.lengths))
            output = self.target.forward(step, self.context.cache)
            logits = self.target.logits(output.features)
        with self._clock("commit"):
            accepted = accept_trees(tree, logits, self.live, random)
            for state in self.live:
                state.stats.target_forwards += 1
            steps = self._advance(tree, accepted)
        return self._learned(accepted.results, steps, time.perf_counter() - started)

    def _learned(
        self, results: Sequence[AcceptResult], steps: list[DecodeStep], seconds: float
    ) -> list[DecodeStep]:
        """Let the policy learn from a step, and return the step with the policy's estimate."""
        trees, paths = [own.tree for own in results], [own.path for own in results]
        self.policy.learn(trees, paths, seconds)
        if len(self.sequences) != 1 or self.policy.autoregressive_seconds is None:
            return steps
        estimate = len(steps[0].token_ids) * self.policy.autoregressive_seconds
        self.sequences[0].stats.autoregressive_seconds += estimate
        return [replace(steps[0], autoregressive_seconds=estimate)]

    def _draft(self, random: StepRandom) -> DraftTree:
        budget = self.policy.next_budget()
        if budget is None or self.context.session is None:
            return DraftTree.empty(self.context.base_length, self.num_steps)
        tokens = [state.token_ids for state in self.live]
        tree = self.context.propose(tokens, budget, random)
        last = self.target.spec.max_position - 1
        if max(self.context.lengths) + tree.max_depth > last:
            tree = tree.limited(last)
        return replace(tree, step_id=self.num_steps)

    def _advance(self, tree: DraftTree, accepted: AcceptedTokens) -> list[DecodeStep]:
        """Emit accepted tokens, make these tokens permanent, and remove complete sequences."""
        pairs = zip(self.live, accepted.results, strict=True)
        steps = [self._emit(state, result) for state, result in pairs]
        # Without later steps, nothing has to be committed.
        if self.is_context_lent or not all(step.finished for step in steps):
            self.context.commit(tree, accepted, [len(step.token_ids) for step in steps])
        self._notify(tree, accepted.results, steps)
        self._retire([step.finished for step in steps])
        return steps

    def _retire(self, is_finished: Sequence[bool]) -> None:
        """Remove complete sequences, after an adaptive session has learned from them as a whole."""
        session = self.context.session
        if isinstance(session, AdaptiveSession):
            for index, state in enumerate(self.live):
                if is_finished[index]:
                    session.on_finished(index, state.token_ids)
        still = _remaining([not finished for finished in is_finished])
        if still and len(still) < len(is_finished):
            self.context.select_sequences(still)
        self.live = [self.live[index] for index in still]

    def _emit(self, state: SequenceState, result: AcceptResult) -> DecodeStep:
        """Append accepted tokens and the next token, one by one, until the request is complete."""
        tree, stats = result.tree, state.stats
        drafted = [(tree.token_ids[n], tree.depth[n], tree.proposer_id[n]) for n in result.path]
        emitted: list[int] = []
        depths: list[int] = []
        finished = False
        stats.count_reached(depth for depth, n in enumerate(result.visited) if n in tree.children)
        stats.proposed_by_proposer.update(
            tree.proposer_id[n] for siblings in tree.children.values() for n in siblings
        )
        for token, depth, proposer in [*drafted, (result.next_token, BONUS, BONUS)]:
            state.token_ids.append(token)
            emitted.append(token)
            depths.append(depth)
            if depth != BONUS:
                stats.accepted[depth] += 1
                stats.accepted_by_proposer[proposer] += 1
            finished = state.request.stop(state.token_ids)
            if finished:
                break
        state.is_finished = finished
        stats.emitted += len(emitted)
        details = None if self.record is None else details_of(self.record, result, emitted)
        return DecodeStep(emitted, depths, finished, state.index, details)

    def _notify(
        self, tree: DraftTree, results: list[AcceptResult], steps: list[DecodeStep]
    ) -> None:
        """Let an adaptive session learn from the verification."""
        session = self.context.session
        if not isinstance(session, AdaptiveSession):
            return
        distributions = [result.distribution for result in results]
        # Tokens accepted after the end of a sequence are not part of its text.
        pairs = zip(results, steps, strict=True)
        paths = [result.path[: len(step.token_ids) - 1] for result, step in pairs]
        verified = VerifyResult(
            step_id=tree.step_id,
            base_length=[distribution.length - 1 for distribution in distributions],
            path=paths,
            num_accepted=[len(path) for path in paths],
            next_token=[step.token_ids[-1] for step in steps],
            finished=[step.finished for step in steps],
            target_probs=lambda index, node: distributions[index](node),
            logits=lambda index, nodes: distributions[index].logits[[node + 1 for node in nodes]],
        )
        session.on_verified(verified)

    @contextmanager
    def _clock(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - started


def longest_of(sequences: Sequence[SequenceState]) -> int:
    """Return the largest number of tokens that any of the sequences may have in the end.

    Args:
        sequences: one or more sequences.
    """
    return max(state.request.max_length for state in sequences)


def _remaining(is_live: Sequence[bool]) -> list[int]:
    """Return the indices of live sequences in their new order.

    The last live sequences move into the gaps. All other sequences keep their index, so that few
    caches are copied.
    """
    count = sum(is_live)
    moving = [index for index in range(count, len(is_live)) if is_live[index]]
    return [index if is_live[index] else moving.pop() for index in range(count)]
