"""Arms are distinct tree sizes with their costs; nodes have comparable positions in all sizes."""

from helpers.tables import no_processors

from inference.autotune.arms import TreeArm, tree_arms
from inference.autotune.costs import Costs
from inference.draft_tree import SequenceTree
from inference.protocol import Budget
from inference.trees.shape import TreePlan, TreeShape

COSTS = Costs(verify={0: 1.0, 4: 1.2, 8: 1.5, 24: 3.0}, draft={1: 0.2, 2: 0.4, 3: 0.6})
LEVELS = {"autoregressive_levels": 3, "parallel_levels": 1}
PLAN = TreePlan(
    greedy=TreeShape(**LEVELS, children=4, breadth=2, num_nodes=24),
    sampling=TreeShape(**LEVELS, children=3, breadth=2, num_nodes=24, sampled=True),
)


def test_shapes_give_distinct_trees_whose_costs_include_drafting() -> None:
    greedy, both = (tree_arms(PLAN, no_processors(do_sample=on), COSTS) for on in (False, True))
    sampled = [arm for arm in both if not arm.budget.deterministic]
    for arms, shape in ((greedy, PLAN.greedy), (sampled, PLAN.sampling)):
        sizes = [(arm.shape.max_nodes, arm.shape.depth) for arm in arms if arm.shape is not None]
        assert len(arms) == len(sizes) == len({arm.block for arm in arms})
        assert sizes == sorted(sizes)
        assert sizes[-1] == (shape.max_nodes, shape.depth)
        assert all(
            arm.seconds > COSTS.verify_seconds(size)
            for arm, (size, _) in zip(arms, sizes, strict=True)
        )


def test_positions_are_ranks_of_deterministic_and_indices_of_sampled_candidates() -> None:
    wanted = {"autoregressive_levels": 2, "children": 2, "breadth": 2}
    deterministic, sampled = (
        TreeArm(Budget(12), (3, 12, 1), 1.0, 0.0, shape.model_copy(update=wanted))
        for shape in PLAN.shapes
    )
    # Two levels of candidates; nodes 2 and 5, with ranks 1 and 3, are accepted.
    tree = SequenceTree(
        [0] * 6, [-1] * 3 + [2] * 3, [1] * 3 + [2] * 3, [0, 4, 1, 5, 2, 3], [], {}, {}, {}
    )
    assert deterministic.positions(tree, [2, 5]) == [(0, 1, 0), (1, 3, 0)]
    # Sampled levels of 2, 4 and 4: node 1; the first child of the second parent; the second child
    # of the first.
    assert sampled.positions(tree, [1, 4, 7]) == [(0, 0, 1), (1, 1, 0), (2, 0, 1)]


def test_siblings_of_sampled_trees_without_a_shape_have_different_ranks_in_the_whole_tree() -> None:
    arm = TreeArm(Budget(12), (3, 12, 1), 1.0)
    # Two children under the root and each of its children, and a deterministic child of the root.
    token_ids, parent, depth = (
        [5, 6, 7, 8, 7, 8, 9],
        [-1, -1, 0, 0, 1, 1, -1],
        [1, 1, 2, 2, 2, 2, 1],
    )
    kind, rank = [1] * 6 + [0], [0, 1, 0, 1, 0, 1, 0]
    columns = [token_ids, parent, depth, kind, rank, [0] * 7, [1] * 7]
    tree = SequenceTree.build(columns, None, 0)
    ranks = [arm.positions(tree, [node])[0][1] for node in range(7)]
    # The first candidates come before the second ones, and the upper level before the lower one.
    assert ranks == [0, 4, 2, 5, 3, 6, 1]
    # A smaller tree is known to lack the second candidates.
    assert TreeArm(Budget(4), (3, 4, 1), 1.0).positions(tree, [1, 5]) == []
