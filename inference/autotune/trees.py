"""The trees from which `tree="auto"` selects, and the learning of which of them pays most."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inference.autotune.costs import Costs
from inference.draft_tree import SequenceTree
from inference.engine.policy import RunProgress
from inference.protocol import Budget
from inference.rates import FadingRates
from inference.sampling.options import Sampling
from inference.trees.shape import TreePlan, TreeShape

NODE_COUNTS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24)
ASSUMED_RATE = 0.5  # acceptance rate of the first candidate before any observation
DOUBT = 4.0  # weight of the assumed rates, in verified trees
MEMORY = 128.0  # number of later trees after which the weight of a tree has dropped to 1/e
# One of this many steps tries something else: if drafting pays, the largest tree or, each fourth
# time, no tree, and otherwise, to draft.
EXPLORE_EVERY = 32
# Largest share of the expected remaining seconds that the drafter may take to read tokens if
# drafting has not paid.
DOUBTFUL_SHARE = 0.05

NodePosition = tuple[int, int, int]  # see `TreeArm.positions`


class TreeArm(NamedTuple):
    """A size of trees that can be selected.

    Attributes:
        block: exclusive upper bounds of the node positions in such a tree.
        shape: shape of the trees of a drafter that is a model; None for other drafters.
        is_chain: whether only the best path of each tree is verified, as deep as the budget allows.
    """

    budget: Budget
    block: NodePosition
    shape: TreeShape | None = None
    is_chain: bool = False

    @property
    def num_nodes(self) -> int:
        if self.is_chain:
            return self.block[0]
        return self.budget.num_nodes if self.shape is None else self.shape.max_nodes

    def drafting(self, costs: Costs) -> float:
        """Return the seconds in which a drafter that is a model drafts such a tree."""
        return 0.0 if self.shape is None else costs.draft[self.shape.autoregressive_levels]

    def positions(self, tree: SequenceTree, path: Sequence[int]) -> list[NodePosition]:
        """Return the positions of the nodes of a path.

        In sampled trees, the position of a candidate is its depth, the index of its parent among
        the expanded nodes, and its index among its siblings. In all other trees, it is the
        candidate's depth and its rank in the whole tree; in chains, its depth.
        """
        if self.is_chain:
            return [(depth, 0, 0) for depth in range(min(len(path), self.block[0]))]
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


def _ranks(tree: SequenceTree) -> Sequence[int]:
    """Return the rank of each node in the whole tree.

    Candidates of a sampled tree have ranks among fewer candidates (see `DraftTree.rank`); they are
    ordered by these ranks, those of the same rank by depth, and padding comes last.
    """
    if not tree.sampled:
        return tree.rank
    valid = {node for siblings in tree.children.values() for node in siblings}
    nodes = range(len(tree.rank))
    order = sorted(nodes, key=lambda node: (node not in valid, tree.rank[node], tree.depth[node]))
    ranks = [0] * len(order)
    for rank, node in enumerate(order):
        ranks[node] = rank
    return ranks


def tree_arms(
    trees: TreePlan | Budget, sampling: Sampling, costs: Costs, *, chains: bool = False
) -> list[TreeArm]:
    """Return the distinct tree sizes, the largest last."""
    if chains:
        return _chain_arms(trees, sampling, costs)
    if isinstance(trees, TreePlan):
        return _shaped_arms(trees.shape(sampling), costs)
    counts = [count for count in NODE_COUNTS if count < trees.num_nodes]
    depth = trees.num_nodes if trees.depth is None else trees.depth
    return [
        TreeArm(Budget(count, depth), (depth, count, 1)) for count in (*counts, trees.num_nodes)
    ]


def _chain_arms(trees: TreePlan | Budget, sampling: Sampling, costs: Costs) -> list[TreeArm]:
    if isinstance(trees, Budget):
        most = min(trees.num_nodes, trees.depth or trees.num_nodes)
        counts = [count for count in NODE_COUNTS if count < most]
        return [
            TreeArm(Budget(count, count), (count, 1, 1), is_chain=True) for count in (*counts, most)
        ]
    shape = trees.shape(sampling)
    budgets = [Budget(shape.max_nodes, depth) for depth in range(1, shape.depth + 1)]
    return [
        TreeArm(budget, (cut.depth, 1, 1), cut, is_chain=True)
        for budget, cut in ((budget, shape.within(budget)) for budget in budgets)
        if cut is not None and cut.autoregressive_levels in costs.draft
    ]


def _shaped_arms(shape: TreeShape, costs: Costs) -> list[TreeArm]:
    arms: dict[NodePosition, tuple[tuple[int, int], TreeArm]] = {}
    for depth in range(1, shape.depth + 1):
        for num_nodes in sorted({*NODE_COUNTS, shape.max_nodes}):
            budget = Budget(num_nodes, depth)
            cut = shape.within(budget)
            if cut is None or cut.autoregressive_levels not in costs.draft:
                continue
            if cut.autoregressive_levels > cut.max_nodes:
                continue  # a path has no node for the last passes: a shallower tree is the same
            block = (cut.depth, cut.max_nodes, 1)
            if cut.sampled:
                block = (cut.depth, cut.breadth if cut.depth > 1 else 1, cut.children)
            arms.setdefault(block, ((cut.max_nodes, cut.depth), TreeArm(budget, block, cut)))
    return [arm for _, arm in sorted(arms.values(), key=lambda sized: sized[0])]


class StepCosts:
    """The modeled seconds of steps with each number of nodes, for certain sizes of trees.

    Attributes:
        verify: seconds to verify a tree, by its number of nodes.
        draft: seconds to draft a tree of each size.
    """

    def __init__(self, costs: Costs, arms: Sequence[TreeArm] = ()) -> None:
        most = max((arm.num_nodes for arm in arms), default=0)
        self.verify = np.array([costs.verify_seconds(count) for count in range(most + 1)])
        self.draft = np.array([arm.drafting(costs) for arm in arms])
        self.read = costs.read

    @property
    def alone(self) -> float:
        """The seconds of a step without drafts."""
        return float(self.verify[0])

    def seconds(self, num_nodes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds of a step with trees of each size, which have so many nodes."""
        return np.interp(num_nodes, np.arange(len(self.verify)), self.verify) + self.draft


class TreeLearner:
    """What is learned from all runs with the same sampling and batch size.

    An acceptance rate is learned for every node position; smaller trees consist of the first
    positions of larger ones. For drafters that may propose fewer nodes than requested, it is also
    learned how many they propose.
    """

    def __init__(self, arms: Sequence[TreeArm]) -> None:
        self.arms = arms
        blocks = np.array([arm.block for arm in arms])
        self._corners = tuple(blocks.T - 1)
        self._cells = tuple(np.indices(blocks.max(axis=0)))
        first = arms[0]
        is_sampled = first.is_chain or (first.shape is not None and first.shape.sampled)
        self._assumed = _assumed_rates(*blocks.max(axis=0).tolist(), is_sampled=is_sampled)
        self._acceptance = FadingRates(self._assumed.shape, MEMORY)
        self._last_nodes = np.array([arm.num_nodes - 1 for arm in arms])
        self._nodes = np.arange(self._last_nodes.max() + 1)
        self._existence = FadingRates(self._nodes.shape, MEMORY)
        self._num_steps = 0

    def index_of(self, budget: Budget | None) -> int | None:
        return next((index for index, arm in enumerate(self.arms) if arm.budget == budget), None)

    def best(self, costs: StepCosts) -> tuple[TreeArm, float]:
        """Return the best size, and the expected share of the seconds that it saves."""
        accepted = self._acceptance.rates(self._cells, self._assumed, DOUBT)
        existing = self._existence.rates((self._nodes,), prior=1.0, doubt=1.0)
        tokens = 1 + accepted.cumsum(0).cumsum(1).cumsum(2)[self._corners]
        values = tokens / costs.seconds(existing.cumsum()[self._last_nodes])
        best = int(values.argmax())
        return self.arms[best], 1 - 1 / (costs.alone * float(values[best]))

    def choose(self, progress: RunProgress, costs: StepCosts) -> TreeArm | None:
        best, gain = self.best(costs)
        turn, step = divmod(self._num_steps, EXPLORE_EVERY)
        self._num_steps += 1
        arm: TreeArm | None = best
        if step == 0 and gain > 0:
            arm = self.arms[-1] if turn % 4 else None  # the first step of all has no drafts
        elif step and gain <= 0:
            arm = None
        if arm is None:
            return None
        if progress.left is not None:
            most = max(DOUBTFUL_SHARE, gain) * progress.left * costs.alone
            if progress.unread * costs.read > most:
                return None
        return arm

    def learn(self, index: int, trees: Sequence[SequenceTree], paths: Sequence[list[int]]) -> None:
        arm, (accepted, offered) = self.arms[index], np.zeros((2, *self._acceptance.shape))
        depth, width, children = arm.block
        offered[:depth, :width, :children] = len(trees)
        for tree, path in zip(trees, paths, strict=True):
            for position in arm.positions(tree, path):
                accepted[position] += 1
        self._acceptance.add(accepted, offered)
        existing = np.sum([self._nodes < len(tree.token_ids) for tree in trees], axis=0)
        requested = (self._nodes < arm.num_nodes) * len(trees)
        self._existence.add(np.minimum(existing, requested) * 1.0, requested * 1.0)


def _assumed_rates(
    depth: int, width: int, children: int, *, is_sampled: bool
) -> NDArray[np.float64]:
    """Return the acceptance rates of all node positions that are assumed before any observation.

    The first candidate below a node is accepted at a fixed rate, and each further one, if those
    before it were rejected, at half the rate of the one before it.
    """
    each = ASSUMED_RATE * 0.5 ** np.arange(max(width, children))
    siblings = each * np.cumprod([1.0, *(1 - each[:-1])])
    rates = np.zeros((depth, width, children))
    for level in range(depth):
        if is_sampled:
            rates[level, 0] = siblings[:children].sum() ** level * siblings[:children]
        elif level < width:
            rates[level, level:, 0] = ASSUMED_RATE**level * siblings[: width - level]
    return rates
