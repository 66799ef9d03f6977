"""Shapes and bookkeeping of draft trees."""

import pytest
import torch
from helpers.tables import Tables, TableSource, no_processors

from inference.draft_tree import ROOT, DraftTree
from inference.tree_builder import TreeBuilder
from inference.tree_shape import TreeShape


def _build(shape: TreeShape, seed: int = 3) -> DraftTree:
    tables = Tables(vocab=6, components=2, seed=seed)
    builder = TreeBuilder(shape, no_processors(), [torch.Generator().manual_seed(seed)])
    return builder.build(TableSource(tables, (0,)), torch.tensor([1]))


def _score(tables: Tables, path: list[int]) -> float:
    prefixes = [(0, *path[:depth]) for depth in range(len(path))]
    laws = [tables.joint(prefix).logsumexp(0) for prefix in prefixes]
    return sum(law[token].item() for law, token in zip(laws, path, strict=True))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_nodes", [1, 4, 7, 9, 12, 99])
def test_deterministic_trees_keep_the_best_candidates_and_all_their_parents(
    num_nodes: int, seed: int
) -> None:
    shape = TreeShape(
        autoregressive_levels=3, parallel_levels=0, children=3, breadth=2, num_nodes=num_nodes
    )
    everything = _build(shape.model_copy(update={"num_nodes": 99}), seed)
    tree = _build(shape, seed)
    assert tree.num_nodes == shape.max_nodes == min(num_nodes, 15)
    best = everything.score[0].sort(descending=True).values[: tree.num_nodes]
    torch.testing.assert_close(tree.score[0].sort(descending=True).values, best)
    torch.testing.assert_close(tree.score[0, tree.rank[0].argsort()], best)
    row = tree.row()
    for node in range(tree.num_nodes):
        path = [row.token_ids[index] for index in row.path(node)]
        assert len(path) == row.depth[node]
        assert row.parent[node] < node
        expected = _score(Tables(vocab=6, components=2, seed=seed), path)
        assert tree.score[0, node].item() == pytest.approx(expected)


@pytest.mark.parametrize("sampled", [False, True])
def test_siblings_never_repeat_a_token(sampled: bool) -> None:
    for seed in range(5):
        shape = TreeShape(children=4, breadth=3, num_nodes=99, sampled=sampled)
        row = _build(shape, seed).row()
        for children in [*row.sampled.values(), *row.deterministic.values()]:
            tokens = [row.token_ids[child] for child in children]
            assert len(tokens) == len(set(tokens)) == 4


def test_sampled_trees_record_the_law_of_every_expanded_node() -> None:
    shape = TreeShape(children=2, breadth=2, sampled=True)
    tree = _build(shape)
    assert tree.num_nodes == shape.max_nodes == 2 + 4 + 4
    row = tree.row()
    for parent, children in row.sampled.items():
        ids, probs = row.draft_law(parent)
        assert probs.sum().item() == pytest.approx(1.0)
        assert {row.token_ids[child] for child in children} <= set(ids.tolist())


def test_an_empty_tree_has_no_candidates() -> None:
    row = DraftTree.empty(torch.tensor([4])).row()
    assert row.token_ids == []
    assert row.path(ROOT) == []


def test_a_limited_tree_keeps_the_candidates_up_to_a_position_and_no_others() -> None:
    tree = _build(TreeShape(children=2, breadth=2, num_nodes=99))  # its root stands at position 1
    for last in range(1, 5):
        kept = tree.limited(last)
        assert kept.is_valid.tolist() == (1 + tree.depth <= last).tolist()
        assert sorted(n for some in kept.row().children.values() for n in some) == [
            node for node, depth in enumerate(tree.depth[0].tolist()) if 1 + depth <= last
        ]
