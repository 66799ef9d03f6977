"""Grows a draft tree level by level from draft laws, deterministic or sampled.

Deterministic trees (EAGLE-2, arXiv 2406.16858): expand the best nodes of each level, score by
cumulative log-probability, keep the best N of all. Sampled trees: children are drawn without
replacement from the recorded law; how many is fixed before they are drawn; none is removed,
reordered or re-ranked afterwards, so N follows from the schedule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from inference.draft_tree import ROOT, DraftTree, SparseLaw
from inference.sampling import Sampling
from inference.tree_assembly import Level, assemble
from inference.tree_shape import TreeShape

LAW_SIZE = 256  # tokens kept of a draft law that children are sampled from


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
        self, source: LawSource, base_length: Int[Tensor, " batch"], round_id: int = 0
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
        return assemble(levels, self.shape, base_length, round_id)

    def _grow(self, joint: Tensor, parents: Tensor, score: Tensor, children: int) -> Level:
        """Choose or draw the children of every parent."""
        # Two by two: several times faster than logsumexp over a short axis.
        log_law = self._shaped(reduce(torch.logaddexp, joint.unbind(dim=2)))
        law = _sparse(log_law) if self.shape.sampled else None
        picked = _top(log_law, children) if law is None else self._drawn(law, children)
        token_ids, log_probs = picked
        at_token = joint.gather(3, token_ids[:, :, None].expand(-1, -1, joint.shape[2], -1))
        fields = (token_ids, parents[:, :, None].expand_as(token_ids), at_token.argmax(dim=2))
        return Level(
            fields=torch.stack(fields, dim=1).flatten(2),
            # A law sums to 1 up to rounding; above 0 a child would outrank its parent.
            score=(score[:, :, None] + log_probs.clamp(max=0)).flatten(1),
            law=law,
            expanded=parents,
        )

    def _shaped(self, log_law: Tensor) -> Tensor:
        return self.sampling.shape_draft(log_law.flatten(0, 1)).unflatten(0, log_law.shape[:2])

    def _drawn(self, law: SparseLaw, children: int) -> tuple[Tensor, Tensor]:
        """Draw children without replacement: Gumbel-top-k, whose order is the draw order."""
        noise = torch.empty(law.probs.shape, dtype=torch.float64)
        for row, generator in zip(noise, self.generators, strict=True):
            row.exponential_(generator=generator)
        noise = noise.to(law.probs)
        log_probs = law.probs.log()
        keys, places = (log_probs - noise.log()).topk(min(children, law.ids.shape[2]), dim=-1)
        drawn = torch.where(keys.isneginf(), keys, log_probs.gather(2, places))
        return law.ids.gather(2, places), drawn


def _top(log_law: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the likeliest tokens of laws; all of one that is not finite have probability 0."""
    log_probs, token_ids = log_law.topk(min(count, log_law.shape[-1]), dim=-1)
    # NaN ranks first: where there is any, or nothing is possible, the first is not finite.
    is_law = log_probs[..., :1].isfinite()
    return token_ids, log_probs.masked_fill(~is_law, -torch.inf)


def _sparse(log_law: Tensor) -> SparseLaw:
    token_ids, log_probs = _top(log_law, LAW_SIZE)
    # A softmax of nothing but -inf is NaN.
    return SparseLaw(token_ids, log_probs.softmax(dim=-1).nan_to_num(nan=0.0))


def _frontier(level: Level, chosen: Tensor) -> Frontier:
    return Frontier(level.token_ids.gather(1, chosen), origin=chosen // level.children)
