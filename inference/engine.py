"""The decode loop: prefill, then draft, verify, accept, commit until the request is complete."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from inference.accept import draw, greedy_walk, walk
from inference.draft_tree import DraftTree, TreeRow
from inference.protocol import Committed, Drafter, DraftSession, VerifyResult
from inference.sampling import ProcessedLaw, Sampling
from inference.stats import DecodeStats
from inference.stopping import StopRule
from jakiro.target import StepInput, StepOutput, TargetAdapter, chain_step

BONUS = 0  # depth of a token that the target itself supplied
DRAFTING = 1  # purpose of the draws of sampled trees, apart from those of acceptance


@dataclass(frozen=True)
class Request:
    """What to decode and when to stop."""

    input_ids: Int[Tensor, "1 prompt"]
    sampling: Sampling
    stop: StopRule
    max_length: int  # prompt included


@dataclass(frozen=True)
class Round:
    """Tokens that became certain together, and how each was won."""

    token_ids: list[int]
    depths: list[int]  # depth in the draft tree, or BONUS
    finished: bool


class DecodeRun:
    """One request being decoded; iterate to advance it by rounds.

    Args:
        target: the frozen target.
        drafter: proposes trees, or None for plain decoding.
        request: what to decode.
    """

    def __init__(self, target: TargetAdapter, drafter: Drafter | None, request: Request) -> None:
        self.target = target
        self.drafter = drafter
        self.request = request
        self.stats = DecodeStats()
        self.token_ids: list[int] = request.input_ids[0].tolist()
        room = request.max_length + (drafter.max_nodes if drafter else 0) + 1
        self.cache = target.new_cache(1, room)
        self.session: DraftSession | None = (
            drafter.open(request.sampling, room) if drafter else None
        )
        self.num_rounds = 0
        self.is_closed = False

    def __iter__(self) -> Iterator[Round]:
        """Yield the prompt's first continuation token, then what each verification made certain."""
        started = time.perf_counter()
        try:
            step = self._prefill()
            while True:
                self.stats.seconds["total"] += time.perf_counter() - started
                yield step
                if step.finished:
                    return
                started = time.perf_counter()
                step = self._round()
        finally:
            self.close()

    def finish(self) -> "DecodeRun":
        """Decode to the end and return the run, for its tokens and statistics."""
        for _ in self:
            pass
        return self

    def close(self) -> None:
        """Free the caches; the tokens and statistics stay."""
        if self.is_closed:
            return
        self.is_closed = True
        if self.session is not None:
            self.session.close()
        del self.cache

    @torch.inference_mode()
    def _prefill(self) -> Round:
        """Read the prompt and decide the first token, the root of the first tree."""
        with self._clock("prefill"):
            step = chain_step(self.request.input_ids, start=0)
            output = self.target.forward(step, self.cache)
            no_drafts = DraftTree.empty(step.lengths).rows()[0]
            result = self._accept(no_drafts, self.target.logits(output.features[0, -1:]))
            done = self._emit(no_drafts, result)
            if not done.finished:
                self._commit(output, list(range(step.token_ids.shape[1])))
        return done

    @torch.inference_mode()
    def _round(self) -> Round:
        """Draft a tree, verify it in one target forward, and keep what the target's law allows."""
        with self._clock("draft"):
            tree = self._draft()
        with self._clock("verify"):
            output = self.target.forward(self._tree_step(tree), self.cache)
            logits = self.target.logits(output.features[0])
            self.stats.target_forwards += 1
        with self._clock("commit"):
            row = tree.rows()[0]
            result = self._accept(row, logits)
            done = self._emit(row, result)
            if not done.finished:
                self._commit(output, [0, *(node + 1 for node in result.path[0])])
            if self.session is not None:
                self.session.feedback(replace(result, finished=[done.finished]))
        return done

    def _draft(self) -> DraftTree:
        self.num_rounds += 1
        root_position = len(self.token_ids) - 1
        fits = self.drafter is not None and (
            root_position + self.drafter.max_depth < self.target.spec.max_position
        )
        if self.drafter is None or self.session is None or not fits:
            return DraftTree.empty(torch.tensor([root_position], device=self.target.device))
        generator = self.request.sampling.generator(0, self.num_rounds, DRAFTING)
        return self.session.propose(self.drafter.max_nodes, generator)

    def _tree_step(self, tree: DraftTree) -> StepInput:
        """Return the root and its tree as one target step; node n is query n + 1."""
        root = torch.tensor([self.token_ids[-1:]], device=self.target.device)
        base = tree.base_length[:, None]
        count = tree.num_nodes + 1
        return StepInput(
            token_ids=torch.cat((root, tree.token_ids), dim=1),
            positions=torch.cat((base, base + tree.depth), dim=1),
            slots=base + torch.arange(count, device=base.device),
            lengths=tree.base_length,
            highest_slot=len(self.token_ids) - 1 + tree.num_nodes,
            parents=torch.cat((torch.full_like(base, -1), tree.parent + 1), dim=1),
            max_depth=tree.max_depth + 1,
        )

    def _accept(self, row: TreeRow, logits: Tensor) -> VerifyResult:
        """Walk down the tree; `logits` has the root's row first, then one per node."""
        sampling = self.request.sampling
        law = ProcessedLaw(logits, self.token_ids.copy(), row, sampling)
        if sampling.is_plain_greedy:
            path, token = greedy_walk(row, logits.argmax(dim=-1).tolist())
        else:
            path, token = self._random_walk(row, law)
        self._count(row, path)
        return VerifyResult(
            round_id=self.num_rounds,
            base_length=len(self.token_ids) - 1,
            path=[path],
            accepted_length=[len(path)],
            next_token=[token],
            finished=[False],
            laws=lambda _sequence, node: law(node),
        )

    def _random_walk(self, row: TreeRow, law: ProcessedLaw) -> tuple[list[int], int]:
        uniforms = self.request.sampling.uniforms(0, self.num_rounds, len(row.token_ids) + 1)
        path, next_law = walk(row, law, lambda probability: next(uniforms) < probability)
        return path, draw(next_law, next(uniforms))

    def _emit(self, row: TreeRow, result: VerifyResult) -> Round:
        """Append tokens one by one until the request is complete."""
        path = result.path[0]
        drafted = [(row.token_ids[node], row.depth[node], row.proposer_id[node]) for node in path]
        emitted: list[int] = []
        depths: list[int] = []
        finished = False
        for token, depth, proposer in [*drafted, (result.next_token[0], BONUS, BONUS)]:
            self.token_ids.append(token)
            emitted.append(token)
            depths.append(depth)
            if depth != BONUS:
                self.stats.accepted[depth] += 1
                self.stats.accepted_by_proposer[proposer] += 1
            finished = self.request.stop(self.token_ids)
            if finished:
                break
        self.stats.emitted += len(emitted)
        return Round(emitted, depths, finished)

    def _commit(self, output: StepOutput, queries: list[int]) -> None:
        """Make accepted rows permanent and tell the session; `queries` index the step's tokens."""
        rows = torch.tensor([queries], device=self.target.device)
        base_length = len(self.token_ids) - 1
        final = torch.arange(base_length - len(queries), base_length, device=rows.device)[None]
        memory = None
        if self.drafter is not None and "memory" in self.drafter.needs:
            memory = self.drafter.encode(output, rows)
        if queries != list(range(len(queries))):
            self.cache.move(output.step.slots.gather(1, rows), final)
        if self.session is not None:
            new = self.token_ids[-len(queries) - 1 :]
            token_ids = torch.tensor([new], device=rows.device)
            self.session.advance(Committed(base_length, token_ids, memory))

    def _count(self, row: TreeRow, path: list[int]) -> None:
        """Count the depths at which a candidate was there to be tried."""
        for depth, parent in enumerate([-1, *path], start=1):
            if row.sampled.get(parent) or row.deterministic.get(parent):
                self.stats.reached[depth] += 1

    @contextmanager
    def _clock(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.stats.seconds[part] += time.perf_counter() - started
