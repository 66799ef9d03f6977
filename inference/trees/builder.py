"""Joins the levels of a draft tree into one tensor of candidates, the best or all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from inference.draft_tree import ROOT, CandidateKind, DraftTree, SparseDistribution
from inference.sampling import Sampling
from inference.trees.shape import TreeShape


class Level(NamedTuple):
    """All candidates of one depth, with the laws they came from."""

    fields: Int[Tensor, "batch 3 n"]  # token, parent (index into all levels, or ROOT), proposer
    score: Float[Tensor, "batch n"]
    distribution: SparseDistribution | None  # of the expanded parents
    expanded: Int[Tensor, "batch f"]  # index of each expanded parent, or ROOT

    @property
    def token_ids(self) -> Int[Tensor, "batch n"]:
        """The candidates' tokens."""
        return self.fields[:, 0]

    @property
    def children(self) -> int:
        """Candidates under each expanded parent."""
        return self.score.shape[1] // self.expanded.shape[1]


def assemble(
    levels: list[Level], shape: TreeShape, base_length: Int[Tensor, " batch"], step_id: int
) -> DraftTree:
    """Return the tree of some levels; parents stand before their children.

    A sampled tree has all candidates, a deterministic one the best `shape.num_nodes` by score.
    """
    score = torch.cat([level.score for level in levels], dim=1)
    score = score.masked_fill(score.isnan(), -torch.inf)  # says nothing, and would rank first
    fields = torch.cat([level.fields for level in levels], dim=2)
    counts = tuple((level.score.shape[1], level.children) for level in levels)
    depth, rank = (one.expand_as(score) for one in _layout(counts, score.device))
    if not shape.sampled:
        order, rank = _best(score, shape.num_nodes)
        depth, score = depth.gather(1, order), score.gather(1, order)
        fields = _reordered(fields, order)
    token_ids, parent, proposer_id = fields.unbind(dim=1)
    kind = CandidateKind.SAMPLED if shape.sampled else CandidateKind.DETERMINISTIC
    return DraftTree(
        token_ids=token_ids,
        parent=parent,
        depth=depth,
        score=score,
        kind=torch.full_like(parent, int(kind)),
        rank=rank,
        proposer_id=proposer_id,
        is_valid=~score.isneginf(),
        base_length=base_length,
        max_depth=len(levels),
        max_siblings=max(level.children for level in levels),
        step_id=step_id,
        draft_probs=_recorded(levels, score.shape[1]) if shape.sampled else None,
    )


@lru_cache(maxsize=256)
def _layout(
    counts: tuple[tuple[int, int], ...], device: torch.device
) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
    """Return depth and turn among siblings of all candidates.

    Args:
        counts: candidates of each level, and how many of them are siblings.
        device: where they live.
    """
    depth = [level for level, (size, _) in enumerate(counts, start=1) for _ in range(size)]
    rank = [place % children for size, children in counts for place in range(size)]
    return torch.tensor(depth, device=device), torch.tensor(rank, device=device)


def _best(score: Tensor, count: int) -> tuple[Int[Tensor, "batch kept"], Int[Tensor, "batch kept"]]:
    """Return the places of the `count` best candidates, ascending, and their ranks by score.

    A parent is kept with any of its children: these never score above it and stand behind it, so a
    stable order ranks it first, ties included.
    """
    ranked = score.sort(dim=1, descending=True, stable=True).indices[:, :count]
    kept = ranked.sort(dim=1)
    return kept.values, kept.indices


def _reordered(fields: Int[Tensor, "batch 3 n"], order: Tensor) -> Int[Tensor, "batch 3 kept"]:
    """Return the kept candidates' fields, their parents counted among the kept ones."""
    places = torch.zeros_like(fields[:, 0])
    places.scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
    kept = fields.gather(2, order[:, None].expand(-1, 3, -1))
    parent = kept[:, 1]
    kept[:, 1] = torch.where(parent == ROOT, ROOT, places.gather(1, parent.clamp(min=0)))
    return kept


def _recorded(levels: list[Level], num_nodes: int) -> SparseDistribution:
    """Lay the laws of the expanded nodes out by node, ROOT first."""
    first = levels[0].distribution
    assert first is not None
    shape = (first.ids.shape[0], num_nodes + 1, first.ids.shape[2])
    ids, probs = first.ids.new_zeros(shape), first.probs.new_zeros(shape)
    for level in levels:
        assert level.distribution is not None
        places = (level.expanded + 1)[:, :, None].expand_as(level.distribution.ids)
        ids.scatter_(1, places, level.distribution.ids)
        probs.scatter_(1, places, level.distribution.probs)
    return SparseDistribution(ids, probs)


DISTRIBUTION_SIZE = 256  # tokens kept of a draft law that children are sampled from


class Frontier(NamedTuple):
    """The nodes whose children are drafted next."""

    token_ids: Int[Tensor, "batch f"]
    origin: Int[Tensor, "batch f"]  # index, in the frontier one level above, of each node's parent


@runtime_checkable
class JointPredictor(Protocol):
    """Whatever predicts: the drafter's session, or a table in a test."""

    def joint(self, depth: int, frontier: Frontier | None) -> Float[Tensor, "batch f comp vocab"]:
        """Return `log(w_e p_e(t))` of candidates at `depth`, for each node of the frontier.

        Args:
            depth: of the candidates, from 1.
            frontier: their parents, or None for the root.
        """
        ...


@dataclass
class TreeBuilder:
    """Builds one round's tree; where a draft law is not finite, there are no candidates.

    Args:
        shape: how the tree grows.
        sampling: shapes the draft laws as the target's are shaped.
        generators: sources of the draws of sampled trees, one per sequence.
    """

    shape: TreeShape
    sampling: Sampling
    generators: Sequence[torch.Generator] = ()

    def build(
        self, source: JointPredictor, base_length: Int[Tensor, " batch"], step_id: int = 0
    ) -> DraftTree:
        """Return the tree that `source` predicts below the root at position `base_length`."""
        levels: list[Level] = []
        frontier: Frontier | None = None
        parents = torch.full_like(base_length, ROOT)[:, None]
        score = torch.zeros(parents.shape, device=parents.device)
        pool_size = 0
        for depth in range(1, self.shape.depth + 1):
            joint = source.joint(depth, frontier)
            level = self._grow(joint, parents, score, self.shape.children)
            levels.append(level)
            if depth == self.shape.depth:
                break
            breadth = min(self.shape.breadth, level.score.shape[1])
            score, chosen = level.score.topk(breadth, dim=1)
            frontier = _frontier(level, chosen)
            parents = chosen + pool_size
            pool_size += level.score.shape[1]
        return assemble(levels, self.shape, base_length, step_id)

    def _grow(self, joint: Tensor, parents: Tensor, score: Tensor, children: int) -> Level:
        """Choose or draw the children of every parent."""
        # Two by two: several times faster than logsumexp over a short axis.
        log_distribution = self._processed(reduce(torch.logaddexp, joint.unbind(dim=2)))
        distribution = _sparse(log_distribution) if self.shape.sampled else None
        picked = (
            _top(log_distribution, children)
            if distribution is None
            else self._sample(distribution, children)
        )
        token_ids, log_probs = picked
        at_token = joint.gather(3, token_ids[:, :, None].expand(-1, -1, joint.shape[2], -1))
        fields = (token_ids, parents[:, :, None].expand_as(token_ids), at_token.argmax(dim=2))
        return Level(
            fields=torch.stack(fields, dim=1).flatten(2),
            # A law sums to 1 up to rounding; above 0 a child would outrank its parent.
            score=(score[:, :, None] + log_probs.clamp(max=0)).flatten(1),
            distribution=distribution,
            expanded=parents,
        )

    def _processed(self, log_probs: Tensor) -> Tensor:
        return self.sampling.processed_draft(log_probs.flatten(0, 1)).unflatten(
            0, log_probs.shape[:2]
        )

    def _sample(self, distribution: SparseDistribution, children: int) -> tuple[Tensor, Tensor]:
        """Draw children without replacement: Gumbel-top-k, whose order is the draw order."""
        noise = torch.empty(distribution.probs.shape, dtype=torch.float64)
        for row, generator in zip(noise, self.generators, strict=True):
            row.exponential_(generator=generator)
        noise = noise.to(distribution.probs)
        log_probs = distribution.probs.log()
        keys, places = (log_probs - noise.log()).topk(
            min(children, distribution.ids.shape[2]), dim=-1
        )
        sampled = torch.where(keys.isneginf(), keys, log_probs.gather(2, places))
        return distribution.ids.gather(2, places), sampled


def _top(log_distribution: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the likeliest tokens of laws; all of one that is not finite have probability 0."""
    log_probs, token_ids = log_distribution.topk(min(count, log_distribution.shape[-1]), dim=-1)
    # NaN ranks first: where there is any, or nothing is possible, the first is not finite.
    is_distribution = log_probs[..., :1].isfinite()
    return token_ids, log_probs.masked_fill(~is_distribution, -torch.inf)


def _sparse(log_distribution: Tensor) -> SparseDistribution:
    token_ids, log_probs = _top(log_distribution, DISTRIBUTION_SIZE)
    # A softmax of nothing but -inf is NaN.
    return SparseDistribution(token_ids, log_probs.softmax(dim=-1).nan_to_num(nan=0.0))


def _frontier(level: Level, chosen: Tensor) -> Frontier:
    return Frontier(level.token_ids.gather(1, chosen), origin=chosen // level.children)
