"""Continuations that were chosen without a law, as trees of deterministic candidates."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float64, Int, Int64
from torch import Tensor

from inference.draft_tree import ROOT, CandidateKind, DraftTree


class Candidates(NamedTuple):
    """Continuations of one root, merged; parents come before their children, siblings differ."""

    token_ids: Int64[np.ndarray, " nodes"]
    parents: Int64[np.ndarray, " nodes"]  # index of a node, or ROOT
    depths: Int64[np.ndarray, " nodes"]  # at least 1
    scores: Float64[np.ndarray, " nodes"]  # in (0, 1], never above the parent's

    @classmethod
    def none(cls) -> "Candidates":
        """Return the tree without candidates."""
        nothing = np.empty(0, np.int64)
        return cls(nothing, nothing, nothing, np.empty(0))

    @classmethod
    def joined(cls, levels: Sequence["Candidates"]) -> "Candidates":
        """Return levels, first ones first, as one tree; parents are counted over all levels."""
        if not levels:
            return cls.none()
        return cls(*(np.concatenate(column) for column in zip(*levels, strict=True)))

    def best(self, count: int) -> "Candidates":
        """Return the tree of at most `count` candidates with the highest scores."""
        if len(self.scores) <= count:
            return self
        # A parent never scores below its children and stands before them: a stable order keeps it.
        kept = np.sort(np.argsort(-self.scores, kind="stable")[:count])
        place = np.full(len(self.scores) + 1, ROOT)  # the last one is where ROOT = -1 looks
        place[kept] = np.arange(len(kept))
        return Candidates(
            self.token_ids[kept], place[self.parents[kept]], self.depths[kept], self.scores[kept]
        )


def deterministic_tree(
    rows: Sequence[Candidates],
    base_length: Int[Tensor, " batch"],
    step_id: int,
    proposers: Sequence[Sequence[int]] = (),
) -> DraftTree:
    """Return candidates of several sequences as trees that verification accepts as point masses.

    Args:
        rows: of each sequence.
        base_length: positions of the roots.
        step_id: of the trees.
        proposers: of each sequence's candidates; by default there is one, 0.
    """
    count = max(len(one.token_ids) for one in rows)
    if count == 0:
        return DraftTree.empty(base_length, step_id)
    fields = np.zeros((6, len(rows), count), np.int64)  # as below
    fields[1], fields[2] = ROOT, 1
    score = np.full((len(rows), count), -np.inf, np.float32)
    for row, one in enumerate(rows):
        order = np.argsort(-one.scores, kind="stable")
        size = len(order)
        fields[:3, row, :size] = one[:3]
        fields[3, row, order] = np.arange(size)
        fields[4, row, :size] = 1
        score[row, :size] = np.log(one.scores)
        if proposers:
            fields[5, row, :size] = proposers[row]
    token_ids, parent, depth, rank, is_valid, proposer_id = torch.from_numpy(fields).to(
        base_length.device
    )
    return DraftTree(
        token_ids=token_ids,
        parent=parent,
        depth=depth,
        score=torch.from_numpy(score).to(base_length.device),
        kind=torch.full_like(parent, int(CandidateKind.DETERMINISTIC)),
        rank=rank,
        proposer_id=proposer_id,
        is_valid=is_valid.bool(),
        base_length=base_length,
        max_depth=int(fields[2].max()),
        max_siblings=max(_most_siblings(one) for one in rows),
        step_id=step_id,
    )


def _most_siblings(candidates: Candidates) -> int:
    return int(np.bincount(candidates.parents + 1).max(initial=0))
