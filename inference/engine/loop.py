"""The decode loop: prefill, then draft, verify, accept, commit until every request is complete."""

import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inference.draft_tree import DraftTree
from inference.engine.acceptance import AcceptResult, accept_trees
from inference.engine.context import PREFILL_CHUNK, Context
from inference.engine.details import OutputOptions, TokenDetails, details_of
from inference.engine.policy import AlwaysDraft, DraftPolicy
from inference.engine.request import Request, SequenceState
from inference.engine.stats import DecodeStats
from inference.protocol import Drafter, VerifyResult
from jakiro.target.adapter import StepInput, TargetAdapter

BONUS = 0  # depth of a token that the target itself supplied
DRAFTING = 1  # purpose of the draws of sampled trees, apart from those of acceptance


@dataclass(frozen=True)
class DecodeStep:
    """Tokens of one sequence that became certain together, and how each was won."""

    token_ids: list[int]
    depths: list[int]  # depth in the draft tree, or BONUS
    finished: bool
    row: int = 0  # which request
    details: TokenDetails | None = None  # where they were asked for


class DecodeRun:
    """Requests being decoded together; iterate to advance all of them by a round.

    Args:
        target: the frozen target.
        drafter: proposes trees, or None for plain decoding.
        requests: what to decode; a single one or several.
        policy: when and how much to draft; by default always, as much as the drafter can.
        context: what is remembered of an earlier turn of a single request; it stays open.
        record: what to note about each token.
    """

    def __init__(
        self,
        target: TargetAdapter,
        drafter: Drafter | None,
        requests: Request | Sequence[Request],
        policy: DraftPolicy | None = None,
        context: Context | None = None,
        record: OutputOptions | None = None,
    ) -> None:
        several = [requests] if isinstance(requests, Request) else list(requests)
        sampling = several[0].sampling
        capacity = max(one.max_length for one in several)
        self.target = target
        self.sequences = [SequenceState.of(index, one) for index, one in enumerate(several)]
        self.live = list(self.sequences)
        self.policy = (policy or AlwaysDraft(drafter)).new_run(sampling, len(several))
        self.record = record
        self.is_context_lent = context is not None
        self.context = context or Context(target, drafter, sampling, len(several), capacity)
        self.context.reserve(capacity)
        self.num_steps = 0
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.is_closed = False

    @property
    def token_ids(self) -> list[int]:
        """Prompt and continuation of the first request."""
        return self.sequences[0].token_ids

    @property
    def stats(self) -> DecodeStats:
        """Counts of all requests, and the seconds of the run."""
        total = DecodeStats.pooled(one.stats for one in self.sequences)
        total.seconds.update(self.seconds)
        return total

    def __iter__(self) -> Generator[list[DecodeStep], None, None]:
        """Yield each sequence's first token, then what each round of verification made certain."""
        started = time.perf_counter()
        try:
            steps = self._prefill()
            while True:
                self.seconds["total"] += time.perf_counter() - started
                yield steps
                if not self.live:
                    return
                started = time.perf_counter()
                steps = self._step()
        finally:
            self.close()

    def finish(self) -> "DecodeRun":
        """Decode to the end and return the run, for its tokens and statistics."""
        for _ in self:
            pass
        return self

    def close(self) -> None:
        """Free the caches unless they are lent; the tokens and statistics stay."""
        if self.is_closed:
            return
        self.is_closed = True
        for one in self.sequences:
            if one.request.ticket is not None:
                one.request.ticket.end()
        if not self.is_context_lent:
            self.context.close()

    @torch.inference_mode()
    def _prefill(self) -> list[DecodeStep]:
        """Read the prompts, chunk by chunk, and decide the first tokens: the roots."""
        with self._clock("prefill"):
            prompts = [one.token_ids for one in self.live]
            cached = self.context.lengths
            counts = [len(ids) - length for ids, length in zip(prompts, cached, strict=True)]
            features: list[Tensor] = [torch.empty(0)] * len(counts)
            for offset in range(0, max(counts), PREFILL_CHUNK):
                width = min(PREFILL_CHUNK, max(counts) - offset)
                output, read = self.context.read(prompts, offset, width)
                for row, count in enumerate(read):
                    if offset + count == counts[row] and count > 0:
                        features[row] = output.features[row, count - 1]
            self.context.lengths = [len(ids) for ids in prompts]
            logits = self.target.logits(torch.stack(features)[:, None])
            tree = DraftTree.empty(torch.tensor(self.context.lengths, device=logits.device))
            return self._advance(tree, accept_trees(tree, logits, self.live, self.num_steps))

    @torch.inference_mode()
    def _step(self) -> list[DecodeStep]:
        """Draft trees, verify them in one target forward, keep what the target's laws allow."""
        started = time.perf_counter()
        self.num_steps += 1
        with self._clock("draft"):
            tree = self._draft()
        with self._clock("verify"):
            output = self.target.forward(self._tree_step(tree), self.context.cache)
            logits = self.target.logits(output.features)
        with self._clock("commit"):
            results = accept_trees(tree, logits, self.live, self.num_steps)
            for one in self.live:
                one.stats.target_forwards += 1
            steps = self._advance(tree, results)
        rows = [result.row for result in results]
        paths = [result.path for result in results]
        self.policy.learn(rows, paths, time.perf_counter() - started)
        return steps

    def _draft(self) -> DraftTree:
        budget = self.policy.next_budget()
        if budget is None or self.context.session is None:
            lengths = torch.tensor(self.context.lengths, device=self.target.device)
            return DraftTree.empty(lengths, self.num_steps)
        samplings = [one.request.sampling for one in self.live]
        generators = [one.generator(self.num_steps, DRAFTING) for one in samplings]
        tokens = [one.token_ids for one in self.live]
        tree = self.context.propose(tokens, budget, generators)
        last = self.target.spec.max_position - 1
        if max(self.context.lengths) + tree.max_depth > last:
            tree = tree.limited(last)
        return replace(tree, step_id=self.num_steps)

    def _tree_step(self, tree: DraftTree) -> StepInput:
        """Return the roots and their trees as one target step; node n is query n + 1."""
        roots = [one.token_ids[-1:] for one in self.live]
        drafts = tree.token_ids.clamp(0, self.target.spec.vocab_size - 1)
        base = tree.base_length[:, None]
        positions = torch.cat((base, base + tree.depth), dim=1)
        count = tree.num_nodes + 1
        return StepInput(
            token_ids=torch.cat((torch.tensor(roots, device=base.device), drafts), dim=1),
            positions=positions.clamp(max=self.target.spec.max_position - 1),
            slots=base + torch.arange(count, device=base.device),
            lengths=tree.base_length,
            highest_slot=max(self.context.lengths) + count - 1,
            parents=torch.cat((torch.full_like(base, -1), tree.parent + 1), dim=1),
            max_depth=tree.max_depth + 1,
        )

    def _advance(self, tree: DraftTree, results: list[AcceptResult]) -> list[DecodeStep]:
        """Emit what was decided, make it permanent, and let go of finished sequences."""
        pairs = list(zip(self.live, results, strict=True))
        steps = [self._emit(one, result) for one, result in pairs]
        if self.num_steps:
            self._commit(results, steps)
            self._notify(tree, results, steps)
        self._notify_finished(steps)
        still = [place for place, one in enumerate(steps) if not one.finished]
        if still and len(still) < len(steps):
            self.context.select_sequences(still)
        self.live = [self.live[place] for place in still]
        return steps

    def _emit(self, one: SequenceState, result: AcceptResult) -> DecodeStep:
        """Append tokens one by one until the request is complete."""
        row = result.row
        drafted = [(row.token_ids[n], row.depth[n], row.proposer_id[n]) for n in result.path]
        emitted: list[int] = []
        depths: list[int] = []
        finished = False
        one.stats.count_reached(
            depth for depth, n in enumerate(result.visited) if n in row.children
        )
        one.stats.proposed_by_proposer.update(
            row.proposer_id[n] for siblings in row.children.values() for n in siblings
        )
        for token, depth, proposer in [*drafted, (result.next_token, BONUS, BONUS)]:
            one.token_ids.append(token)
            emitted.append(token)
            depths.append(depth)
            if depth != BONUS:
                one.stats.accepted[depth] += 1
                one.stats.accepted_by_proposer[proposer] += 1
            finished = one.request.stop(one.token_ids)
            if finished:
                break
        one.stats.emitted += len(emitted)
        details = None if self.record is None else details_of(self.record, result, emitted)
        return DecodeStep(emitted, depths, finished, one.index, details)

    def _commit(self, results: list[AcceptResult], steps: list[DecodeStep]) -> None:
        """Make the rows of emitted tokens permanent: of all but the last, which is the new root."""
        if not self.is_context_lent and all(one.finished for one in steps):
            return
        lengths = self.context.lengths
        self.context.commit(
            [
                [length + 1 + node for node in result.visited[: len(one.token_ids)]]
                for length, result, one in zip(lengths, results, steps, strict=True)
            ]
        )

    def _notify(
        self, tree: DraftTree, results: list[AcceptResult], steps: list[DecodeStep]
    ) -> None:
        if self.context.session is None:
            return
        distributions = [verified.distribution for verified in results]
        # What was accepted behind the end of a sequence is none of its text.
        pairs = zip(results, steps, strict=True)
        paths = [verified.path[: len(one.token_ids) - 1] for verified, one in pairs]
        verified = VerifyResult(
            step_id=tree.step_id,
            base_length=[distribution.length - 1 for distribution in distributions],
            path=paths,
            num_accepted=[len(path) for path in paths],
            next_token=[one.token_ids[-1] for one in steps],
            finished=[one.finished for one in steps],
            target_probs=lambda sequence, node: distributions[sequence](node),
            logits=lambda sequence, nodes: distributions[sequence].logits[
                [node + 1 for node in nodes]
            ],
        )
        self.context.session.on_verified(verified)

    def _notify_finished(self, steps: list[DecodeStep]) -> None:
        """Show the drafter what is complete, the end of which it has not been told of."""
        if self.context.session is None:
            return
        for place, one in enumerate(steps):
            if one.finished:
                self.context.session.on_finished(place, self.live[place].token_ids)

    @contextmanager
    def _clock(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - started
