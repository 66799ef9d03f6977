"""Draft trees: candidate continuations of one root, and the laws that sampled ones came from."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

NUM_FIELDS = 7  # integers of a candidate that the host looks at
ROOT = -1  # as a parent: the last emitted token, which the target has not read yet


class CandidateKind(IntEnum):
    """How a candidate came to stand in the tree; it decides the rule that may accept it."""

    DETERMINISTIC = 0  # chosen, not drawn: accepted as a point mass
    SAMPLED = 1  # drawn without replacement from a recorded law: multi-round rule


@dataclass(frozen=True)
class SparseDistribution:
    """Draft laws cut to their m likeliest tokens and renormalised; children are drawn from that."""

    ids: Int[Tensor, "batch parents m"]
    probs: Float[Tensor, "batch parents m"]


@dataclass(frozen=True)
class DraftTree:
    """A tree of N candidates per sequence; parents come before their children."""

    token_ids: Int[Tensor, "batch nodes"]
    parent: Int[Tensor, "batch nodes"]  # index of a node, or ROOT
    depth: Int[Tensor, "batch nodes"]  # at least 1
    score: Float[Tensor, "batch nodes"]  # cumulative draft log-probability
    kind: Int[Tensor, "batch nodes"]  # CandidateKind
    rank: Int[Tensor, "batch nodes"]  # drawn: order among siblings; chosen: by score among all
    proposer_id: Int[Tensor, "batch nodes"]  # expert or source that favoured the candidate most
    is_valid: Bool[Tensor, "batch nodes"]  # padding is False
    base_length: Int[Tensor, " batch"]  # position of the root
    max_depth: int
    max_siblings: int  # most candidates under one parent
    step_id: int = 0
    draft_probs: SparseDistribution | None = (
        None  # of ROOT at 0 and of node n at n + 1; zero where nothing was drawn
    )

    @property
    def num_nodes(self) -> int:
        """Number of candidates, padding included."""
        return self.token_ids.shape[1]

    @classmethod
    def empty(cls, base_length: Int[Tensor, " batch"], step_id: int = 0) -> "DraftTree":
        """Return the tree without candidates: verifying it is a plain decoding step."""
        ints = torch.zeros(len(base_length), 0, dtype=torch.long, device=base_length.device)
        return cls(
            token_ids=ints,
            parent=ints,
            depth=ints,
            score=ints.float(),
            kind=ints,
            rank=ints,
            proposer_id=ints,
            is_valid=ints.bool(),
            base_length=base_length,
            max_depth=0,
            max_siblings=0,
            step_id=step_id,
        )

    def limited(self, last_position: int) -> "DraftTree":
        """Return the tree without the candidates beyond a position.

        Whole depths go, which is decided before anything is drawn: exact for sampled trees, too.
        """
        fits = self.base_length[:, None] + self.depth <= last_position
        return replace(self, is_valid=self.is_valid & fits)

    def rows(self, extra: Int[Tensor, "batch any"]) -> tuple[list["TreeRow"], list[list[int]]]:
        """Return a host-side view of each sequence's tree, and the rows of `extra`.

        The only copy off the device in a round of decoding: what else the host must know travels
        along as `extra`.
        """
        fields = (self.token_ids, self.parent, self.depth, self.kind, self.rank)
        packed = torch.cat((*fields, self.proposer_id, self.is_valid.long(), extra), dim=1).tolist()
        count = self.num_nodes
        columns = [
            [row[place * count : (place + 1) * count] for place in range(NUM_FIELDS)]
            for row in packed
        ]
        rows = [TreeRow.build(one, self.draft_probs, index) for index, one in enumerate(columns)]
        return rows, [row[NUM_FIELDS * count :] for row in packed]

    def row(self, index: int = 0) -> "TreeRow":
        """Return the host-side view of one sequence's tree."""
        return self.rows(self.token_ids[:, :0])[0][index]


@dataclass(frozen=True)
class TreeRow:
    """One sequence's tree as plain lists, for the walk that accepts candidates."""

    token_ids: list[int]
    parent: list[int]
    depth: list[int]
    rank: list[int]
    proposer_id: list[int]
    sampled: dict[int, list[int]]  # parent -> children in draw order
    deterministic: dict[int, list[int]]  # parent -> children
    children: dict[int, list[int]]  # parent -> all of them
    draft_probs: SparseDistribution | None = None
    index: int = 0

    @classmethod
    def build(
        cls, columns: list[list[int]], draft_probs: SparseDistribution | None, index: int
    ) -> "TreeRow":
        """Sort the valid candidates by parent and kind.

        Args:
            columns: token, parent, depth, kind, rank, proposer and validity of every node.
            laws: of the whole batch.
            index: the row's place in the batch.
        """
        token_ids, parent, depth, kind, rank, proposer_id, is_valid = columns
        sampled: dict[int, list[int]] = {}
        deterministic: dict[int, list[int]] = {}
        children: dict[int, list[int]] = {}
        for node in (node for node, valid in enumerate(is_valid) if valid):
            by_kind = sampled if kind[node] == CandidateKind.SAMPLED else deterministic
            by_kind.setdefault(parent[node], []).append(node)
            children.setdefault(parent[node], []).append(node)
        for siblings in sampled.values():
            siblings.sort(key=rank.__getitem__)
        kinds = (sampled, deterministic, children)
        return cls(token_ids, parent, depth, rank, proposer_id, *kinds, draft_probs, index)

    def draft_distribution(self, parent: int) -> tuple[Int[Tensor, " m"], Float[Tensor, " m"]]:
        """Return ids and probabilities of the law that sampled children of `parent` came from."""
        if self.draft_probs is None:
            raise ValueError(f"sampled candidates under node {parent} come without their draft law")
        return self.draft_probs.ids[self.index, parent + 1], self.draft_probs.probs[
            self.index, parent + 1
        ]

    def follow(self, token_ids: Sequence[int]) -> list[int]:
        """Return the nodes that tokens lead to from the root, as far as there are any."""
        nodes: list[int] = []
        for token in token_ids:
            siblings = self.children.get(nodes[-1] if nodes else ROOT, ())
            found = [node for node in siblings if self.token_ids[node] == token]
            if not found:
                break
            nodes.append(found[0])
        return nodes

    def path(self, node: int) -> list[int]:
        """Return the nodes from the first level down to `node`; empty for ROOT."""
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = self.parent[node]
        return nodes[::-1]
