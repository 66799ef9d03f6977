"""Draft trees: candidate continuations of a root, and the distributions of sampled candidates.

The root is the last emitted token, which the target has not read yet; it is not a node of the tree.
Parents come before their children. Here is a tree of five nodes; the target continues with
"cat sat down":

    the (ROOT = -1)        node       0     1     2     3     4
    |-- 0 cat              token_ids  cat   dog   sat   ran   down
    |   |-- 2 sat          parent     ROOT  ROOT  0     0     2
    |   |   `-- 4 down     depth      1     1     2     2     3
    |   `-- 3 ran
    `-- 1 dog              accepted path: 0, 2, 4; then the target's next token

Four types describe a tree on its way from the drafter to acceptance:

    TreeLevel --assemble--> DraftTree --to_host--> SequenceTree --accept--> path, next token
    Candidates --to_tree-------^

A drafter that predicts distributions grows one `TreeLevel` per depth (`inference.trees.builder`); a
drafter that looks up continuations returns `Candidates` (`inference.drafters.candidates`). Both are
converted into a `DraftTree`, which holds the tensors of a whole batch on the device. Candidates are
accepted on the device, or on the host from one `SequenceTree` per sequence.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from jakiro.target.adapter import TargetSpec
from jakiro.target.step import StepInput
from jakiro.utils.devices import indices_on

NUM_FIELDS = 7  # integers per candidate that are copied to the host
ROOT = -1  # the parent of first-level nodes: the last emitted token, which the target has not read


class CandidateKind(IntEnum):
    """The way a candidate was selected, which determines its acceptance rule."""

    DETERMINISTIC = 0  # selected without sampling: accepted as a point mass
    SAMPLED = 1  # sampled without replacement: accepted by recursive rejection sampling


@dataclass(frozen=True)
class SparseDistribution:
    """Draft distributions from which children are sampled, truncated to the m most likely tokens.

    Attributes:
        probs: probabilities of these tokens, renormalized.
    """

    ids: Int[Tensor, "batch parents m"]
    probs: Float[Tensor, "batch parents m"]

    def each(self, change: Callable[[Tensor], Tensor]) -> "SparseDistribution":
        """Return the distributions after the same change of ids and probabilities."""
        return SparseDistribution(change(self.ids), change(self.probs))


@dataclass(frozen=True)
class DraftTree:
    """The draft trees of a batch, one for each sequence; parents come before their children."""

    token_ids: Int[Tensor, "batch nodes"]
    parent: Int[Tensor, "batch nodes"]  # index of a node, or ROOT
    depth: Int[Tensor, "batch nodes"]  # at least 1
    score: Float[Tensor, "batch nodes"]  # cumulative draft log-probability
    kind: Int[Tensor, "batch nodes"]  # CandidateKind
    # sampled candidates: order of sampling among siblings; deterministic candidates: rank by score
    # in the whole tree
    rank: Int[Tensor, "batch nodes"]
    proposer_id: Int[Tensor, "batch nodes"]  # expert or drafter that scored the candidate highest
    is_valid: Bool[Tensor, "batch nodes"]  # False for padding
    base_length: Int[Tensor, " batch"]  # position of the root
    max_depth: int
    max_siblings: int  # largest number of candidates under one parent
    # distributions from which the children of ROOT (index 0) and of node n (index n + 1) were
    # sampled; zeros if a node has no sampled children; None if the trees have no sampled candidates
    draft_probs: SparseDistribution | None = None

    @property
    def num_nodes(self) -> int:
        return self.token_ids.shape[1]

    @classmethod
    def empty(cls, base_length: Int[Tensor, " batch"]) -> "DraftTree":
        """Return trees without candidates; verifying them is ordinary autoregressive decoding."""
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
        )

    def limited(self, last_position: int) -> "DraftTree":
        """Return the trees without the candidates at positions after `last_position`.

        Whole levels are removed, independently of what was sampled, so that acceptance stays exact.
        """
        fits = self.base_length[:, None] + self.depth <= last_position
        return replace(self, is_valid=self.is_valid & fits)

    def without(self, indices: Iterable[int]) -> "DraftTree":
        index = indices_on(self.token_ids.device, list(indices))
        return replace(self, is_valid=self.is_valid.index_fill(0, index, False))

    def chain(self) -> "DraftTree":
        """Return the best path of each tree as a tree.

        Below each node, the path takes the candidate that was sampled first or, if none was
        sampled, the one with the best rank. What is left out does not depend on which tokens were
        sampled, so that acceptance stays exact. In the chains, all ranks are 0.
        """
        if self.max_depth == 0:
            return self
        worst = 2 * self.num_nodes
        key = self.rank + self.num_nodes * (self.kind != CandidateKind.SAMPLED)
        node = torch.full_like(self.base_length, ROOT)
        path: list[Tensor] = []
        for _ in range(self.max_depth):
            is_child = self.is_valid & (self.parent == node[:, None])
            best = key.masked_fill(~is_child, worst).min(dim=1)
            node = best.indices.where(best.values < worst, -2)  # the parent of no node
            path.append(node)
        nodes = torch.stack(path, dim=1)
        nodes = nodes[:, : int((nodes >= 0).sum(dim=1).max())]
        is_valid, index = nodes >= 0, nodes.clamp(min=0)
        ascending = torch.arange(nodes.shape[1], device=nodes.device).expand_as(nodes)
        probs = self.draft_probs
        if probs is not None:
            source = torch.cat((torch.zeros_like(index[:, :1]), index + 1), dim=1)[:, :, None]
            probs = probs.each(lambda part: part.gather(1, source.expand(-1, -1, part.shape[2])))
        return replace(
            self,
            token_ids=self.token_ids.gather(1, index),
            parent=ascending - 1,
            depth=ascending + 1,
            score=self.score.gather(1, index),
            kind=self.kind.gather(1, index),
            rank=torch.zeros_like(index),
            proposer_id=self.proposer_id.gather(1, index),
            is_valid=is_valid,
            max_depth=nodes.shape[1],
            max_siblings=min(1, nodes.shape[1]),
            draft_probs=probs,
        )

    def of_sequences(self, indices: Sequence[int]) -> "DraftTree":
        index = indices_on(self.token_ids.device, indices)
        fields = vars(self).items()
        taken: dict[str, Any] = {
            name: part[index] for name, part in fields if isinstance(part, Tensor)
        }
        probs = self.draft_probs
        if probs is not None:
            probs = probs.each(lambda part: part[index])
        return replace(self, **taken, draft_probs=probs)

    def to_step(
        self, roots: Int[Tensor, "batch 1"], spec: TargetSpec, highest: int, start: int | None
    ) -> StepInput:
        """Return a target step that reads roots and trees; node n is query n + 1.

        Args:
            highest: upper bound of the positions of the roots.
            start: position of the only root; None if there are several, or it is not known here.
        """
        base, count = self.base_length[:, None], self.num_nodes + 1
        positions = torch.cat((base, base + self.depth), dim=1)
        return StepInput(
            token_ids=torch.cat((roots, self.token_ids.clamp(0, spec.vocab_size - 1)), dim=1),
            positions=positions.clamp(max=spec.max_position - 1),
            slots=base + torch.arange(count, device=base.device),
            lengths=self.base_length,
            highest_slot=highest + count - 1,
            parents=torch.cat((torch.full_like(base, -1), self.parent + 1), dim=1),
            max_depth=self.max_depth + 1,
            start=start,
        )

    def to_host(self) -> list["SequenceTree"]:
        return self.unpacked(self.packed().tolist())[0]

    def packed(self, extra: Int[Tensor, "batch any"] | None = None) -> Int[Tensor, "batch fields"]:
        """Return all integers that the host needs, so that they can be copied at once.

        Args:
            extra: all others that the host needs, because a step copies from the device only once.
        """
        fields = [self.token_ids, self.parent, self.depth, self.kind, self.rank, self.proposer_id]
        fields += [self.is_valid.long(), *([] if extra is None else [extra])]
        return torch.cat(fields, dim=1)

    def unpacked(
        self, packed: Sequence[list[int]], indices: Sequence[int] | None = None
    ) -> tuple[list["SequenceTree"], list[list[int]]]:
        count = self.num_nodes
        columns = [
            [values[field * count : (field + 1) * count] for field in range(NUM_FIELDS)]
            for values in packed
        ]
        batch = range(len(packed)) if indices is None else indices
        trees = [
            SequenceTree.build(fields, self.draft_probs, index)
            for index, fields in zip(batch, columns, strict=True)
        ]
        return trees, [values[NUM_FIELDS * count :] for values in packed]

    def sequence_tree(self) -> "SequenceTree":
        return self.to_host()[0]


@dataclass(frozen=True)
class SequenceTree:
    """The tree of one sequence as plain lists, from which candidates are accepted on the host."""

    token_ids: list[int]
    parent: list[int]
    depth: list[int]
    rank: list[int]
    proposer_id: list[int]
    sampled: dict[int, list[int]]  # parent -> sampled children in the order of sampling
    deterministic: dict[int, list[int]]  # parent -> deterministic children
    children: dict[int, list[int]]  # parent -> all children
    draft_probs: SparseDistribution | None = None  # distributions of the whole batch
    index: int = 0  # batch index of the sequence

    @classmethod
    def build(
        cls, columns: list[list[int]], draft_probs: SparseDistribution | None, index: int
    ) -> "SequenceTree":
        """Return the tree with its valid candidates grouped by parent and kind.

        Args:
            columns: token, parent, depth, kind, rank, proposer and validity of every node.
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
        """Return the ids and probabilities that children of `parent` were sampled from."""
        if self.draft_probs is None:
            raise ValueError(f"the sampled candidates under node {parent} come without draft_probs")
        here = self.index, parent + 1
        return self.draft_probs.ids[here], self.draft_probs.probs[here]

    def follow(self, token_ids: Sequence[int]) -> list[int]:
        """Return the nodes along a path of tokens from the root, as far as the tree contains it."""
        nodes: list[int] = []
        for token in token_ids:
            siblings = self.children.get(nodes[-1] if nodes else ROOT, ())
            node = next((node for node in siblings if self.token_ids[node] == token), None)
            if node is None:
                break
            nodes.append(node)
        return nodes

    def best_path(self) -> list[int]:
        """Return the nodes of the path with the best rank at each level, down to a leaf.

        Among sampled siblings, this is the one that was sampled first.
        """
        nodes: list[int] = []
        while siblings := self.children.get(nodes[-1] if nodes else ROOT):
            nodes.append(min(siblings, key=self.rank.__getitem__))
        return nodes

    def path(self, node: int) -> list[int]:
        """Return the nodes from the first level down to `node`; empty for ROOT."""
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = self.parent[node]
        return nodes[::-1]
