"""Candidates of one sequence as numpy columns, and their conversion to draft trees."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int, Int64
from torch import Tensor

from inference.draft_tree import ROOT, CandidateKind, DraftTree, SparseDistribution
from inference.sampling.grammar import GrammarProcessor


class Candidates(NamedTuple):
    """A tree of continuations of one root.

    Parents come before their children, and siblings have different tokens.
    """

    token_ids: Int64[np.ndarray, " nodes"]
    parents: Int64[np.ndarray, " nodes"]  # index of a node, or ROOT
    depths: Int64[np.ndarray, " nodes"]  # at least 1
    scores: Float64[np.ndarray, " nodes"]  # in (0, 1], never above the parent's score
    source: Int64[np.ndarray, " nodes"] | None = None  # proposer ids; None if all are 0
    # index of each candidate's node in the tree that these candidates were taken from; None if they
    # were not taken from a tree
    origin: Int64[np.ndarray, " nodes"] | None = None
    # measure of the reliability of all candidates together, such as the length of a match; None if
    # there is no such measure besides the scores
    strength: int | None = None
    # order of sampling among siblings; -1 for deterministic candidates, None if all are
    drawn: Int64[np.ndarray, " nodes"] | None = None
    is_valid: Bool[np.ndarray, " nodes"] | None = None  # None if all are

    @classmethod
    def none(cls) -> "Candidates":
        nothing = np.empty(0, np.int64)
        return cls(nothing, nothing, nothing, np.empty(0))

    @classmethod
    def chain(cls, token_ids: Int64[np.ndarray, " nodes"]) -> "Candidates":
        count = len(token_ids)
        ascending = np.arange(count)
        return cls(np.asarray(token_ids, np.int64), ascending - 1, ascending + 1, np.ones(count))

    @classmethod
    def of(cls, nodes: Sequence[tuple[int, int, int, float]]) -> "Candidates":
        """Return the tree of the given nodes, each in the form (token, parent, depth, score)."""
        if not nodes:
            return cls.none()
        *integers, scores = zip(*nodes, strict=True)
        token_ids, parents, depths = np.array(integers, np.int64)
        return cls(token_ids, parents, depths, np.array(scores))

    @property
    def shares(self) -> Float64[np.ndarray, " nodes"]:
        """The ratio of each candidate's score to the score of its parent."""
        # The parent index ROOT = -1 selects the last element, which is the score of the root.
        return np.asarray(self.scores / np.append(self.scores, 1.0)[self.parents])

    def best(self, count: int) -> "Candidates":
        if len(self.scores) <= count:
            return self
        # A parent comes before its children and never has a lower score. Because the sort is
        # stable, the parent of every kept candidate is therefore kept as well.
        return self._only(np.sort(np.argsort(-self.scores, kind="stable")[:count]))

    def allowed_by(
        self, grammar: GrammarProcessor | None, path: Sequence[int] = ()
    ) -> "Candidates":
        """Return the tree without the candidates that a grammar forbids after a path."""
        if grammar is None:
            return self
        paths = {ROOT: list(path)}
        for node, (token, parent) in enumerate(zip(self.token_ids, self.parents, strict=True)):
            if parent in paths and grammar.allows(longer := [*paths[parent], int(token)]):
                paths[node] = longer
        return self._only(np.array(list(paths)[1:], np.int64))

    def _only(self, kept: Int64[np.ndarray, " kept"]) -> "Candidates":
        """Return the tree of these candidates, each of which comes with its ancestors."""
        # The parent index ROOT = -1 selects the last element, which stays ROOT.
        new_index = np.full(len(self.scores) + 1, ROOT)
        new_index[kept] = np.arange(len(kept))
        return Candidates(
            self.token_ids[kept],
            new_index[self.parents[kept]],
            self.depths[kept],
            self.scores[kept],
            None if self.source is None else self.source[kept],
            None if self.origin is None else self.origin[kept],
            self.strength,
        )


def to_tree(
    candidates: Sequence[Candidates],
    base_length: Int[Tensor, " batch"],
    draft_probs: SparseDistribution | None = None,
) -> DraftTree:
    """Return draft trees of the given candidates."""
    count = max(len(row.token_ids) for row in candidates)
    if count == 0:
        return DraftTree.empty(base_length)
    fields = np.zeros((7, len(candidates), count), np.int64)  # in the order of `unbind` below
    fields[1], fields[2] = ROOT, 1
    score = np.full((len(candidates), count), -np.inf, np.float32)
    for index, row in enumerate(candidates):
        order = np.argsort(-row.scores, kind="stable")
        size = len(order)
        fields[:3, index, :size] = row[:3]
        fields[4, index, :size] = 1 if row.is_valid is None else row.is_valid
        np.log(row.scores, where=row.scores > 0, out=score[index, :size])
        if row.source is not None:
            fields[5, index, :size] = row.source
        if row.drawn is not None:
            is_drawn = row.drawn >= 0
            fields[3, index, :size] = row.drawn
            fields[6, index, :size] = np.where(
                is_drawn, CandidateKind.SAMPLED, CandidateKind.DETERMINISTIC
            )
            order = order[~is_drawn[order]]
        fields[3, index, order] = np.arange(len(order))
    token_ids, parent, depth, rank, is_valid, proposer_id, kind = (
        torch.from_numpy(fields).to(base_length.device).unbind()
    )
    return DraftTree(
        token_ids=token_ids,
        parent=parent,
        depth=depth,
        score=torch.from_numpy(score).to(base_length.device),
        kind=kind,
        rank=rank,
        proposer_id=proposer_id,
        is_valid=is_valid.bool(),
        base_length=base_length,
        max_depth=int(fields[2].max()),
        max_siblings=max(int(np.bincount(row.parents + 1).max(initial=0)) for row in candidates),
        draft_probs=draft_probs,
    )
