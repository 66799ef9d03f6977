"""Grows a draft tree level by level from draft laws, deterministic or sampled.

Deterministic trees (EAGLE-2, arXiv 2406.16858): expand the best nodes of each level, score by
cumulative log-probability, keep the best N of all. Sampled trees: children are drawn without
replacement from the recorded law; how many is fixed before they are drawn; none is removed,
reordered or re-ranked afterwards, so N follows from the schedule.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from inference.draft_tree import ROOT, CandidateKind, DraftTree, SparseLaw
from inference.protocol import Budget
from inference.sampling import Sampling
from jakiro.settings import Settings

LAW_SIZE = 256  # tokens kept of a draft law that children are sampled from
MAX_PASSES = 16  # most drafter passes for one tree


class TreeShape(Settings):
    """How a draft tree grows."""

    autoregressive_levels: int = Field(2, ge=1, le=MAX_PASSES)  # drafter passes A
    parallel_levels: int = Field(1, ge=0)  # further levels P, read off the last pass
    children: int = Field(3, ge=1)  # candidates under each expanded node
    breadth: int = Field(2, ge=1)  # nodes expanded per level
    num_nodes: int = Field(8, ge=1)  # deterministic trees keep the best N of all candidates
    sampled: bool = False

    @property
    def depth(self) -> int:
        """Longest path of the tree."""
        return self.autoregressive_levels + self.parallel_levels

    @property
    def level_sizes(self) -> list[int]:
        """Candidates at each depth, before the best are chosen."""
        sizes = [self.children]
        for _ in range(self.depth - 1):
            sizes.append(self.children * min(self.breadth, sizes[-1]))
        return sizes

    @property
    def max_nodes(self) -> int:
        """Nodes that verification must have room for."""
        everything = sum(self.level_sizes)
        return everything if self.sampled else min(self.num_nodes, everything)

    def within(self, budget: Budget) -> "TreeShape | None":
        """Return the shape cut to a budget; None where no tree fits.

        Depth goes first by passes, then by parallel levels. A deterministic tree gives up its worst
        candidates; a sampled one, of which none may be taken back, draws fewer.
        """
        return _cut(self, budget)


@lru_cache(maxsize=1024)
def _cut(shape: TreeShape, budget: Budget) -> TreeShape | None:
    depth = shape.depth if budget.depth is None else min(budget.depth, shape.depth)
    if min(depth, budget.num_nodes) < 1:
        return None
    passes = max(1, depth - shape.parallel_levels)
    levels = {"autoregressive_levels": passes, "parallel_levels": depth - passes}
    num_nodes = min(budget.num_nodes, shape.num_nodes)
    cut = shape.model_copy(update={**levels, "num_nodes": num_nodes})
    return _narrowed(cut, budget.num_nodes) if shape.sampled else cut


def _narrowed(shape: TreeShape, num_nodes: int) -> TreeShape | None:
    """Return the widest shape of this depth whose draws fit; None where not even a chain."""
    sizes = [(c, b) for c in range(1, shape.children + 1) for b in range(1, shape.breadth + 1)]
    shapes = [shape.model_copy(update={"children": c, "breadth": b}) for c, b in sizes]
    fitting = [one for one in shapes if one.max_nodes <= num_nodes]
    return max(fitting, key=lambda one: (one.max_nodes, one.children), default=None)


class TreePlan(Settings):
    """The trees of greedy and of random decoding.

    Where tokens are drawn, drawn candidates are accepted more often than chosen ones.
    """

    greedy: TreeShape = TreeShape()
    sampling: TreeShape = TreeShape(children=2, breadth=2, sampled=True)

    @property
    def shapes(self) -> tuple[TreeShape, TreeShape]:
        """Both trees."""
        return self.greedy, self.sampling

    def shape(self, sampling: Sampling) -> TreeShape:
        """Return the tree for a request."""
        return self.sampling if sampling.do_sample else self.greedy

    @classmethod
    def of(cls, tree: "TreeShape | TreePlan") -> "TreePlan":
        """Return the plan that uses one shape throughout, or the plan itself."""
        return tree if isinstance(tree, TreePlan) else cls(greedy=tree, sampling=tree)


class Frontier(NamedTuple):
    """The nodes whose children are drafted next."""

    token_ids: Int[Tensor, "batch f"]
    origin: Int[Tensor, "batch f"]  # index, in the frontier one level above, of each node's parent


@runtime_checkable
class LawSource(Protocol):
    """Whatever predicts: the drafter's session, or a table in a test."""

    def joint(self, depth: int, frontier: Frontier | None) -> Float[Tensor, "batch f comp vocab"]:
        """Return `log(w_e p_e(t))` of candidates at `depth`, for each node of the frontier.

        Args:
            depth: of the candidates, from 1.
            frontier: their parents, or None for the root.
        """
        ...


class Level(NamedTuple):
    """All candidates of one depth, with the laws they came from."""

    token_ids: Int[Tensor, "batch n"]
    parent: Int[Tensor, "batch n"]  # index into the pool of all levels, or ROOT
    score: Float[Tensor, "batch n"]
    rank: Int[Tensor, "batch n"]
    proposer_id: Int[Tensor, "batch n"]
    law: SparseLaw | None  # of the expanded parents
    expanded: Int[Tensor, "batch f"]  # pool index of each expanded parent, or ROOT


@dataclass
class TreeBuilder:
    """Builds one round's tree.

    Args:
        shape: how the tree grows.
        sampling: shapes the draft laws as the target's are shaped.
        generators: sources of the draws of sampled trees, one per sequence.
    """

    shape: TreeShape
    sampling: Sampling
    generators: Sequence[torch.Generator] = ()

    def build(
        self, source: LawSource, base_length: Int[Tensor, " batch"], round_id: int = 0
    ) -> DraftTree:
        """Return the tree that `source` predicts below the root at position `base_length`."""
        levels: list[Level] = []
        frontier: Frontier | None = None
        parents = torch.full_like(base_length, ROOT)[:, None]
        score = torch.zeros(parents.shape, device=parents.device)
        pool_size = 0
        for depth in range(1, self.shape.depth + 1):
            level = self._grow(source.joint(depth, frontier), parents, score)
            levels.append(level)
            if depth == self.shape.depth:
                break
            score, chosen = level.score.topk(min(self.shape.breadth, level.score.shape[1]), dim=1)
            frontier = _frontier(level, chosen)
            parents = chosen + pool_size
            pool_size += level.score.shape[1]
        tree = _assemble(levels, base_length, round_id, self.shape.sampled)
        if self.shape.sampled:
            return tree
        best = _keep_best(tree, self.shape.num_nodes)
        order = best.score.argsort(dim=1, descending=True, stable=True)
        return replace(best, rank=order.argsort(dim=1))

    def _grow(self, joint: Tensor, parents: Tensor, score: Tensor) -> Level:
        """Choose or draw the children of every parent."""
        # A law sums to 1 up to rounding; above 0 a child would outrank its parent.
        log_law = self._shaped(joint.logsumexp(dim=2)).clamp(max=0)
        law = _sparse(log_law) if self.shape.sampled else None
        picked = _top(log_law, self.shape.children) if law is None else self._drawn(law)
        token_ids, log_probs = picked
        at_token = joint.gather(3, token_ids[:, :, None].expand(-1, -1, joint.shape[2], -1))
        ranks = torch.arange(token_ids.shape[2], device=token_ids.device).expand_as(token_ids)
        return Level(
            token_ids=token_ids.flatten(1),
            parent=parents[:, :, None].expand_as(token_ids).flatten(1),
            score=(score[:, :, None] + log_probs).flatten(1),
            rank=ranks.flatten(1),
            proposer_id=at_token.argmax(dim=2).flatten(1),
            law=law,
            expanded=parents,
        )

    def _shaped(self, log_law: Tensor) -> Tensor:
        return self.sampling.shape_draft(log_law.flatten(0, 1)).unflatten(0, log_law.shape[:2])

    def _drawn(self, law: SparseLaw) -> tuple[Tensor, Tensor]:
        """Draw children without replacement: Gumbel-top-k, whose order is the draw order."""
        noise = torch.empty(law.probs.shape, dtype=torch.float64)
        for row, generator in zip(noise, self.generators, strict=True):
            row.exponential_(generator=generator)
        noise = noise.to(law.probs)
        log_probs = law.probs.log()
        keys, places = (log_probs - noise.log()).topk(
            min(self.shape.children, law.ids.shape[2]), dim=-1
        )
        drawn = torch.where(keys.isneginf(), keys, log_probs.gather(2, places))
        return law.ids.gather(2, places), drawn


def _top(log_law: Tensor, count: int) -> tuple[Tensor, Tensor]:
    log_probs, token_ids = log_law.topk(min(count, log_law.shape[-1]), dim=-1)
    return token_ids, log_probs


def _sparse(log_law: Tensor) -> SparseLaw:
    token_ids, log_probs = _top(log_law, LAW_SIZE)
    return SparseLaw(token_ids, log_probs.softmax(dim=-1))


def _frontier(level: Level, chosen: Tensor) -> Frontier:
    children = level.score.shape[1] // level.expanded.shape[1]
    return Frontier(token_ids=level.token_ids.gather(1, chosen), origin=chosen // children)


def _assemble(levels: list[Level], base_length: Tensor, round_id: int, sampled: bool) -> DraftTree:
    """Join the levels into one tree; parents stand before their children."""

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(level, name) for level in levels], dim=1)

    score = joined("score")
    kind = CandidateKind.SAMPLED if sampled else CandidateKind.DETERMINISTIC
    sizes = torch.tensor([level.score.shape[1] for level in levels], device=score.device)
    depths = torch.arange(1, len(levels) + 1, device=score.device).repeat_interleave(sizes)
    return DraftTree(
        token_ids=joined("token_ids"),
        parent=joined("parent"),
        depth=depths.expand(len(score), -1),
        score=score,
        kind=torch.full(score.shape, int(kind), device=score.device),
        rank=joined("rank"),
        proposer_id=joined("proposer_id"),
        is_valid=~score.isneginf(),
        base_length=base_length,
        max_depth=len(levels),
        max_siblings=max(level.score.shape[1] // level.expanded.shape[1] for level in levels),
        round_id=round_id,
        laws=_recorded(levels, score.shape[1]) if sampled else None,
    )


def _recorded(levels: list[Level], num_nodes: int) -> SparseLaw:
    """Lay the laws of the expanded nodes out by node, ROOT first."""
    first = levels[0].law
    assert first is not None
    shape = (first.ids.shape[0], num_nodes + 1, first.ids.shape[2])
    ids, probs = first.ids.new_zeros(shape), first.probs.new_zeros(shape)
    for level in levels:
        assert level.law is not None
        places = (level.expanded + 1)[:, :, None].expand_as(level.law.ids)
        ids.scatter_(1, places, level.law.ids)
        probs.scatter_(1, places, level.law.probs)
    return SparseLaw(ids, probs)


def _keep_best(tree: DraftTree, count: int) -> DraftTree:
    """Keep the `count` candidates of highest score; a parent outranks its children."""
    if tree.num_nodes <= count:
        return tree
    # Children never score above their parent and stand behind it, so a stable order keeps every
    # kept node's parent, ties included.
    order = tree.score.sort(dim=1, descending=True, stable=True).indices[:, :count].sort().values
    places = torch.zeros_like(tree.parent)
    places.scatter_(1, order, torch.arange(count, device=order.device).expand_as(order))
    parent = tree.parent.gather(1, order)
    moved = torch.where(parent == ROOT, ROOT, places.gather(1, parent.clamp(min=0)))

    def kept(values: Tensor) -> Tensor:
        return values.gather(1, order)

    return DraftTree(
        token_ids=kept(tree.token_ids),
        parent=moved,
        depth=kept(tree.depth),
        score=kept(tree.score),
        kind=kept(tree.kind),
        rank=kept(tree.rank),
        proposer_id=kept(tree.proposer_id),
        is_valid=kept(tree.is_valid),
        base_length=tree.base_length,
        max_depth=tree.max_depth,
        max_siblings=tree.max_siblings,
        round_id=tree.round_id,
    )
