"""An oracle drafter for targets that follow a cycle, with or without the cost of real drafting."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from inference.draft_tree import ROOT, CandidateKind, DraftTree, SparseDistribution
from inference.drafters.trained.drafter import TrainedDrafter
from inference.profiling.gpu.cycle import Cycle
from inference.protocol import (
    Budget,
    Committed,
    DeviceSession,
    Drafter,
    DraftSession,
    EncodedMemory,
)
from inference.sampling.batch import BatchSampling
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import StepRandom
from inference.trees.builder import DISTRIBUTION_SIZE
from inference.trees.shape import TreePlan, TreeShape
from jakiro.target.step import StepOutput


@dataclass(frozen=True)
class _Path:
    """The candidates that get the right tokens, one on each of the first levels."""

    nodes: Int[Tensor, "batch right"]
    parents: Int[Tensor, "batch right"]  # parents of these candidates; the first is ROOT
    ranks: Int[Tensor, "batch right"]  # ranks of these candidates


class CycleDrafter(Drafter):
    """Drafts trees in which the right tokens are on the first levels, and all others are wrong.

    The right tokens are looked up on the device. If there is an inner drafter, it drafts every tree
    in full before the tokens are replaced, so that drafting takes as long as with the inner one.

    Args:
        cycle: cycle that the target follows.
        num_right: number of levels with a right token, at least 1; tau is `num_right` + 1.
        plan: shapes of the trees; the inner drafter must have the same shapes.
        inner: drafter whose trees get new tokens; None for trees of a fixed structure.
    """

    def __init__(
        self, cycle: Cycle, num_right: int, plan: TreePlan, inner: TrainedDrafter | None = None
    ) -> None:
        assert 1 <= num_right <= min(shape.depth for shape in plan.shapes)
        self.cycle = cycle
        self.num_right = num_right
        self.plan = plan
        self.inner = inner
        self.version = "cycle"
        if inner is not None:
            self.needs, self.hidden_states = inner.needs, inner.hidden_states
            self.version, self.bytes_per_token = inner.version, inner.bytes_per_token

    @property
    def max_nodes(self) -> int:
        """The largest number of nodes in a tree."""
        return max(shape.max_nodes for shape in self.plan.shapes)

    @property
    def max_depth(self) -> int:
        """The length of the longest path in a tree."""
        return max(shape.depth for shape in self.plan.shapes)

    def new_session(self, sampling: Sampling, capacity: int, batch: int = 1) -> "CycleSession":
        """Return a session for `batch` sequences.

        Args:
            sampling: options by which tokens are selected.
            capacity: largest number of tokens of a sequence, including the root and a draft tree.
            batch: number of sequences.
        """
        inner = None if self.inner is None else self.inner.new_session(sampling, capacity, batch)
        return CycleSession(self, sampling, inner, batch)

    def encode_memory(
        self, output: StepOutput, queries: Int[Tensor, "batch queries"] | None = None
    ) -> EncodedMemory:
        """Return the encoded memory of tokens that the target has read.

        Args:
            output: output of the target's forward pass over the tokens.
            queries: query indices of the tokens in that forward pass; None for all queries.

        Raises:
            RuntimeError: there is no inner drafter.
        """
        if self.inner is None:
            return super().encode_memory(output, queries)
        return self.inner.encode_memory(output, queries)

    def with_right_tokens(self, tree: DraftTree, root: Int[Tensor, "batch 1"]) -> DraftTree:
        """Return a tree of the same structure in which only tokens on one path are right.

        Siblings get consecutive tokens in the order of their ranks. If they were sampled, the ids
        of the distribution that they were sampled from are replaced in the same way.

        Args:
            tree: trees of any tokens.
            root: root of each tree.
        """
        right = self.cycle.levels(root, tree.max_depth)
        path = self._path(tree)
        first = self._first_token(right, path, tree.parent, tree.depth)
        vocab_size = len(self.cycle.successor)
        changed = replace(tree, token_ids=(first + tree.rank) % vocab_size)
        if tree.draft_probs is None:
            return changed
        probs = tree.draft_probs.probs
        nodes = torch.arange(-1, tree.num_nodes, device=root.device).expand(len(root), -1)
        depth = torch.cat((torch.zeros_like(root), tree.depth), dim=1) + 1  # of the children
        first = self._first_token(right, path, nodes, depth.clamp(max=tree.max_depth))
        ids = first[:, :, None] + torch.arange(probs.shape[2], device=root.device)
        return replace(changed, draft_probs=SparseDistribution(ids % vocab_size, probs))

    def _path(self, tree: DraftTree) -> _Path:
        """Return the path to the first candidate on the last level that gets a right token."""
        is_end = (tree.depth == self.num_right) & tree.is_valid
        nodes = [is_end.long().argmax(dim=1, keepdim=True)]
        for _ in range(self.num_right - 1):
            nodes.append(tree.parent.gather(1, nodes[-1]).clamp(min=0))
        path = torch.cat(nodes[::-1], dim=1)
        parents = torch.cat((torch.full_like(path[:, :1], ROOT), path[:, :-1]), dim=1)
        return _Path(path, parents, tree.rank.gather(1, path))

    def _first_token(self, right: Tensor, path: _Path, parent: Tensor, depth: Tensor) -> Tensor:
        """Return the token of the first sibling below each parent.

        Args:
            right: right token at each depth.
            path: candidates that get right tokens.
            parent: nodes whose children get the tokens.
            depth: depth of these children.
        """
        at_depth = right.gather(1, depth - 1)
        level = (depth - 1).clamp(max=self.num_right - 1)
        is_on_path = (depth <= self.num_right) & (parent == path.parents.gather(1, level))
        return torch.where(is_on_path, at_depth - path.ranks.gather(1, level), at_depth + 1)


class CycleSession(DeviceSession):
    """A session that knows the roots, on the device, and the structure of the trees.

    Args:
        drafter: drafter of the session.
        sampling: options by which tokens are selected.
        inner: session of the inner drafter; None if there is no inner drafter.
        batch: number of sequences.
    """

    lengths: tuple[int, ...] = ()

    def __init__(
        self, drafter: CycleDrafter, sampling: Sampling, inner: DeviceSession | None, batch: int
    ) -> None:
        self.drafter = drafter
        self.shape = drafter.plan.shape(sampling)
        self.inner = inner
        self.lengths = (0,) * batch
        self.base_length: Tensor | None = None  # the lengths on the device
        self.root: Tensor | None = None
        self.fixed: DraftTree | None = None

    @property
    def is_sampled(self) -> bool:
        """Whether candidates count as sampled."""
        return self.shape.sampled

    def advance(self, committed: Committed) -> None:
        """Store the positions and the tokens of the roots."""
        self.lengths, self.root = committed.base_length, committed.root
        self.base_length = committed.end
        if self.inner is not None:
            self.inner.advance(committed)

    def propose(self, budget: Budget, random: StepRandom) -> DraftTree:
        """Return the trees below the roots.

        Args:
            budget: limits of every tree; they apply only to the inner drafter.
            random: random numbers of this step, for sampled trees.
        """
        assert self.root is not None, "advance before propose"
        if self.inner is not None:
            tree = self.inner.propose(budget, random)
        else:
            tree = self._fixed_tree(self.root)
        return self.drafter.with_right_tokens(tree, self.root)

    def show_rows(self, sampling: BatchSampling) -> None:
        """Switch to sequences with these options, whose lengths are 0 until `follow` is called."""
        self.lengths = (0,) * len(sampling.each)
        self.root, self.base_length = None, None
        self.fixed = None  # it has another number of sequences
        if self.inner is not None:
            self.inner.show_rows(sampling)

    def follow(
        self,
        lengths: tuple[int, ...],
        base_length: Int[Tensor, " batch"],
        root: Int[Tensor, "batch 1"],
    ) -> None:
        """Set the lengths and roots.

        Args:
            lengths: number of verified tokens of each sequence, or an upper bound of it.
            base_length: number of verified tokens on the device.
            root: last token of each sequence.
        """
        self.lengths, self.base_length, self.root = lengths, base_length, root
        if self.inner is not None:
            self.inner.follow(lengths, base_length, root)

    def rollback(self, length: int) -> None:
        """Discard everything from position `length` on."""
        self.lengths = tuple(min(length, own) for own in self.lengths)
        if self.inner is not None:
            self.inner.rollback(length)

    def select_sequences(self, indices: Sequence[int]) -> None:
        """Keep only the sequences at these batch indices, in this order."""
        self.lengths = tuple(self.lengths[index] for index in indices)
        self.fixed = None  # it has another number of sequences
        if self.root is not None and self.base_length is not None:
            kept = list(indices)
            self.root, self.base_length = self.root[kept], self.base_length[kept]
        if self.inner is not None:
            self.inner.select_sequences(indices)

    def append_sequences(self, other: DraftSession) -> None:
        """Add the sequences of another session."""
        assert isinstance(other, CycleSession)
        assert other.root is not None
        assert other.base_length is not None
        self.fixed = None  # it has another number of sequences
        if self.root is None or self.base_length is None:
            self.root, self.base_length = other.root, other.base_length
        else:
            self.root = torch.cat((self.root, other.root))
            self.base_length = torch.cat((self.base_length, other.base_length))
        self.lengths += other.lengths
        if self.inner is not None and other.inner is not None:
            self.inner.append_sequences(other.inner)

    def reserve(self, capacity: int) -> None:
        """Make room for sequences of up to `capacity` tokens."""
        if self.inner is not None:
            self.inner.reserve(capacity)

    def close(self) -> None:
        """Free the memory of the inner session."""
        if self.inner is not None:
            self.inner.close()

    def _fixed_tree(self, root: Tensor) -> DraftTree:
        if self.fixed is None:
            self.fixed = fixed_tree(self.shape, len(root), root.device)
        assert self.base_length is not None
        return replace(self.fixed, base_length=self.base_length)


def fixed_tree(shape: TreeShape, batch: int, device: torch.device) -> DraftTree:
    """Return trees of a shape, in which the first nodes of each level have children.

    Args:
        shape: shape of the trees; of a deterministic tree, the first nodes are kept.
        batch: number of trees.
        device: device of the trees.
    """
    parents: list[int] = []
    depths: list[int] = []
    ranks: list[int] = []
    level = [ROOT]
    for depth in range(1, shape.depth + 1):
        start = len(parents)
        parents += [parent for parent in level for _ in range(shape.children)]
        ranks += [rank for _ in level for rank in range(shape.children)]
        depths += [depth] * (len(parents) - start)
        level = list(range(start, len(parents)))[: shape.breadth]
    columns = torch.tensor([parents, depths, ranks], device=device)[:, : shape.max_nodes]
    parent, depth, rank = columns[:, None].expand(-1, batch, -1)
    kind = CandidateKind.SAMPLED if shape.sampled else CandidateKind.DETERMINISTIC
    return DraftTree(
        token_ids=torch.zeros_like(parent),
        parent=parent,
        depth=depth,
        score=torch.zeros_like(parent).float(),
        kind=torch.full_like(parent, int(kind)),
        rank=rank,
        proposer_id=torch.zeros_like(parent),
        is_valid=torch.ones_like(parent).bool(),
        base_length=torch.zeros_like(parent[:, 0]),
        max_depth=shape.depth,
        max_siblings=shape.children,
        draft_probs=_even_distributions(parent) if shape.sampled else None,
    )


def _even_distributions(parent: Tensor) -> SparseDistribution:
    """Return a distribution below the root and each node: uniform, or zeros without children."""
    batch, count = parent.shape
    has_children = torch.zeros(batch, count + 1, 1, device=parent.device)
    has_children.scatter_(1, (parent + 1)[:, :, None], 1.0)
    probs = (has_children / DISTRIBUTION_SIZE).expand(-1, -1, DISTRIBUTION_SIZE)
    return SparseDistribution(torch.zeros_like(probs).long(), probs)
