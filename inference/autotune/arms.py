"""The trees from which `tree="auto"` selects, and the modeled seconds of a step with each."""

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

from inference.autotune.costs import Costs
from inference.draft_tree import SequenceTree
from inference.protocol import Budget
from inference.sampling.options import Sampling
from inference.trees.shape import TreePlan, TreeShape

NODE_COUNTS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24)
ASSUMED_RATE = 0.6  # acceptance rate of the first candidate before any observation

NodePosition = tuple[int, int, int]  # see `TreeArm.positions`


class TreeArm(NamedTuple):
    """A size and kind of trees that can be selected.

    Attributes:
        block: exclusive upper bounds of the node positions in such a tree.
        seconds: seconds of a step with such a tree, according to the cost model: to verify it and,
            for a drafter that is a model, to draft it.
        shape: shape of the trees of a drafter that is a model; None for other drafters.
    """

    budget: Budget
    block: NodePosition
    seconds: float
    shape: TreeShape | None = None

    def positions(self, tree: SequenceTree, path: Sequence[int]) -> list[NodePosition]:
        """Return the positions of the nodes of a path.

        In sampled trees with a shape, the position of a candidate is its depth, the index
        of its parent among the expanded nodes, and its index among its siblings. In all other
        trees, it is the candidate's depth and its rank in the whole tree. Candidates of a sampled
        tree have ranks among fewer candidates (see `DraftTree.rank`); in the whole tree, they are
        ordered by these ranks, and candidates of the same rank by depth.
        """
        if self.shape is None or not self.shape.sampled:
            ranks = _ranks(tree)
            ranked = [(tree.depth[node] - 1, ranks[node], 0) for node in path]
            # Nodes that exceed the budget, if a drafter proposes any, are not counted.
            return [position for position in ranked if position[1] < self.block[1]]
        children = self.shape.children
        first = [0, *accumulate(self.shape.level_sizes)]
        return [
            (depth, (node - first[depth]) // children, (node - first[depth]) % children)
            for depth, node in enumerate(path)
        ]

    @property
    def assumed_tau(self) -> float:
        """The mean acceptance length that is assumed for trees whose size must not be learned."""
        depth, width, children = self.block
        if self.shape is None or not self.shape.sampled:
            return sum(ASSUMED_RATE**rank for rank in range(width + 1))
        rejected = prod(1 - ASSUMED_RATE / 2**sibling for sibling in range(children))
        return sum((1 - rejected) ** level for level in range(depth + 1))


def tree_arms(trees: TreePlan | Budget, sampling: Sampling, costs: Costs) -> list[TreeArm]:
    """Return the distinct tree sizes, the largest last.

    If a drafter that is a model samples candidates, these are followed by the sizes of its
    deterministic trees, again with the largest last.
    """
    if isinstance(trees, TreePlan):
        shape = trees.shape(sampling)
        arms = _shaped_arms(shape, costs)
        if shape.sampled and not trees.greedy.sampled:
            arms += _shaped_arms(trees.greedy, costs, is_other_kind=True)
        return arms
    counts = [count for count in NODE_COUNTS if count < trees.num_nodes]
    depth = trees.num_nodes if trees.depth is None else trees.depth
    return [
        TreeArm(
            Budget(count, depth),
            (depth, count, 1),
            costs.verify_seconds(count),
        )
        for count in (*counts, trees.num_nodes)
    ]


def _shaped_arms(shape: TreeShape, costs: Costs, is_other_kind: bool = False) -> list[TreeArm]:
    arms: dict[NodePosition, tuple[tuple[int, int], TreeArm]] = {}
    for depth in range(1, shape.depth + 1):
        for num_nodes in sorted({*NODE_COUNTS, shape.max_nodes}):
            budget = Budget(num_nodes, depth, deterministic=is_other_kind)
            cut = shape.within(budget)
            if cut is None or cut.autoregressive_levels not in costs.draft:
                continue
            if cut.autoregressive_levels > cut.max_nodes:
                continue  # a path has no node for the last passes: a shallower tree is the same
            passes = cut.autoregressive_levels
            seconds = costs.verify_seconds(cut.max_nodes) + costs.draft[passes]
            block = (cut.depth, cut.max_nodes, 1)
            if cut.sampled:
                block = (cut.depth, cut.breadth if cut.depth > 1 else 1, cut.children)
            size = (cut.max_nodes, cut.depth)
            arms.setdefault(block, (size, TreeArm(budget, block, seconds, cut)))
    return [arm for _, arm in sorted(arms.values(), key=lambda sized: sized[0])]


def _ranks(tree: SequenceTree) -> Sequence[int]:
    """Return the rank of each node in the whole tree."""
    if not tree.sampled:
        return tree.rank
    # Padding comes last.
    valid = {node for siblings in tree.children.values() for node in siblings}
    nodes = range(len(tree.rank))
    order = sorted(nodes, key=lambda node: (node not in valid, tree.rank[node], tree.depth[node]))
    ranks = [0] * len(order)
    for rank, node in enumerate(order):
        ranks[node] = rank
    return ranks
