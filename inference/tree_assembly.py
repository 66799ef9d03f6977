"""Joins the levels of a draft tree into one tensor of candidates, the best or all of them."""

from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from inference.draft_tree import ROOT, CandidateKind, DraftTree, SparseLaw
from inference.tree_shape import TreeShape


class Level(NamedTuple):
    """All candidates of one depth, with the laws they came from."""

    fields: Int[Tensor, "batch 3 n"]  # token, parent (index into all levels, or ROOT), proposer
    score: Float[Tensor, "batch n"]
    law: SparseLaw | None  # of the expanded parents
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
    levels: list[Level], shape: TreeShape, base_length: Int[Tensor, " batch"], round_id: int
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
        round_id=round_id,
        laws=_recorded(levels, score.shape[1]) if shape.sampled else None,
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
    turn = [place % children for size, children in counts for place in range(size)]
    return torch.tensor(depth, device=device), torch.tensor(turn, device=device)


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
