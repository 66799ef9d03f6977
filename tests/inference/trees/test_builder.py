"""Shapes and bookkeeping of draft trees."""

from dataclasses import replace

import pytest
import torch
from helpers.tables import Prefix, Tables, TableSource, no_processors
from torch import Tensor
from transformers import EtaLogitsWarper, LogitsProcessorList, TemperatureLogitsWarper

from inference.draft_tree import ROOT, DraftTree
from inference.remote.tree_frame import encode_step
from inference.sampling.batch import BatchSampling
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import StepRandom
from inference.trees.builder import TreeBuilder, TreeLevel
from inference.trees.shape import TreeShape


def _build(shape: TreeShape, seed: int = 3) -> DraftTree:
    tables = Tables(vocab=6, components=2, seed=seed)
    builder = TreeBuilder(shape, BatchSampling([no_processors()]), StepRandom([(seed,)]))
    return builder.build(TableSource(tables, (0,)), torch.tensor([1]))


def _score(tables: Tables, path: list[int]) -> float:
    prefixes = [(0, *path[:depth]) for depth in range(len(path))]
    log_probs = [tables.joint(prefix).logsumexp(0) for prefix in prefixes]
    return sum(own[token].item() for own, token in zip(log_probs, path, strict=True))


@pytest.mark.parametrize(("num_nodes", "seed"), [(1, 0), (4, 1), (7, 2), (9, 3), (12, 4), (99, 5)])
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
    row = tree.sequence_tree()
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
        row = _build(shape, seed).sequence_tree()
        for children in [*row.sampled.values(), *row.deterministic.values()]:
            tokens = [row.token_ids[child] for child in children]
            assert len(tokens) == len(set(tokens)) == 4


def test_sampled_trees_record_draft_probs_of_every_expanded_node() -> None:
    shape = TreeShape(children=2, breadth=2, sampled=True)
    tree = _build(shape)
    assert tree.num_nodes == shape.max_nodes == 2 + 4 + 4
    row = tree.sequence_tree()
    for parent, children in row.sampled.items():
        ids, probs = row.draft_distribution(parent)
        assert probs.sum().item() == pytest.approx(1.0)
        assert {row.token_ids[child] for child in children} <= set(ids.tolist())


def test_a_limited_tree_keeps_the_candidates_up_to_a_position_and_no_others() -> None:
    tree = _build(TreeShape(children=2, breadth=2, num_nodes=99))  # its root is at position 1
    for last in range(1, 5):
        kept = tree.limited(last)
        assert kept.is_valid.tolist() == (1 + tree.depth <= last).tolist()
        assert sorted(n for some in kept.sequence_tree().children.values() for n in some) == [
            node for node, depth in enumerate(tree.depth[0].tolist()) if 1 + depth <= last
        ]


class HoledSource(TableSource):
    """Tables whose distributions after the token `after` are not finite."""

    def __init__(self, tables: Tables, prefix: Prefix, fault: float, after: int) -> None:
        super().__init__(tables, prefix)
        self.fault, self.after = fault, after

    def joint(self, depth: int, frontier: TreeLevel | None) -> Tensor:
        """Return log-probabilities; after the token `after`, one or all of them are `fault`."""
        log_probs = super().joint(depth, frontier)
        for index, prefix in enumerate(self.frontier):
            if prefix[-1] == self.after:
                entries = slice(None) if self.fault == -torch.inf else 2
                log_probs[0, index, :, entries] = self.fault
        return log_probs


ETA = Sampling(
    LogitsProcessorList([TemperatureLogitsWarper(0.9), EtaLogitsWarper(1e-4)]), do_sample=True
)


@pytest.mark.parametrize(
    ("sampled", "fault", "sampling"),
    [
        (False, torch.nan, no_processors()),
        (True, torch.nan, ETA),
        (True, torch.inf, no_processors()),
        (False, -torch.inf, ETA),
    ],
)
def test_where_a_distribution_is_not_finite_there_are_no_candidates(
    sampled: bool, fault: float, sampling: Sampling
) -> None:
    shape = TreeShape(
        autoregressive_levels=3, parallel_levels=0, children=6, breadth=6, sampled=sampled
    )
    if not sampled:
        shape = shape.model_copy(update={"num_nodes": 60})
    tables, random = Tables(6, 2, seed=3), StepRandom([(0,)])
    builder = TreeBuilder(shape, BatchSampling([sampling]), random)
    tree = builder.build(HoledSource(tables, (0,), fault, after=4), torch.tensor([1]))
    row = tree.sequence_tree()
    assert not tree.score.isnan().any()
    assert tree.draft_probs is None or bool(tree.draft_probs.probs.isfinite().all())
    reachable = {node for siblings in row.children.values() for node in siblings}
    spoilt = [node for node in reachable if row.token_ids[node] == 4]
    assert spoilt
    assert not set(spoilt) & set(row.children)
    assert any(parent >= 0 for parent in row.children)
    empty = builder.build(HoledSource(tables, (4,), fault, after=4), torch.tensor([1]))
    assert not bool(empty.is_valid.any())


def test_candidates_for_another_machine_are_sampled_from_integer_weights() -> None:
    tables = Tables(vocab=6, components=2, seed=4)
    sampling = replace(no_processors(), quantizes_drafts=True)
    shape = TreeShape(
        autoregressive_levels=2, parallel_levels=0, children=2, breadth=2, sampled=True
    )
    counts = torch.zeros(6)
    for seed in range(200):
        builder = TreeBuilder(shape, BatchSampling([sampling]), StepRandom([(seed,)]))
        tree = builder.build(TableSource(tables, (0,)), torch.tensor([1])).sequence_tree()
        encode_step(1, 0, tree)  # raises an error unless all weights are integers
        counts[tree.token_ids[tree.sampled[ROOT][0]]] += 1
    ids, probs = tree.draft_distribution(ROOT)
    assert ((counts[ids] / 200 - probs) ** 2 / probs).sum() * 200 < 25  # chi-square, 5 degrees
