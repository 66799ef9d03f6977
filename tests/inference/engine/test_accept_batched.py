"""Batched acceptance decides like acceptance of one sequence, given the same random numbers."""

from dataclasses import replace

import pytest
import torch
from helpers.random_trees import RandomTrees, joined
from helpers.tables import Tables, TableSource, logits_in_tree, no_processors
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

from inference.draft_tree import ROOT, CandidateKind, DraftTree, SparseDistribution
from inference.engine.accept import accept_greedy_path, accept_path, sample_token
from inference.engine.accept_batched import accept_greedy_paths, accept_paths
from inference.engine.acceptance import ProcessedDistribution
from inference.sampling.batch import BatchSampling
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import StepRandom
from inference.trees.builder import TreeBuilder
from inference.trees.shape import TreeShape
from jakiro.errors import DraftError

SHAPES = {
    "deterministic": TreeShape(children=3, breadth=2, num_nodes=8),
    "sampled": TreeShape(children=3, breadth=2, sampled=True),
    "chain": TreeShape(autoregressive_levels=4, parallel_levels=0, children=1, breadth=1),
}
VOCAB, BATCH, GREEDY_BATCH = 7, 60, 80
PROCESSED = Sampling(
    LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(4)]), do_sample=True
)


def _trees(shape: TreeShape, tables: Tables, sampling: Sampling) -> list[DraftTree]:
    trees = []
    for index in range(BATCH):
        builder = TreeBuilder(shape, BatchSampling([sampling]), StepRandom([(index,)]))
        trees.append(builder.build(TableSource(tables, (index % VOCAB,)), torch.tensor([1])))
    return trees


def _mixed(tree: DraftTree) -> DraftTree:
    """Make the last sampled child of each node a deterministic candidate with a fixed token."""
    is_last = tree.rank == tree.max_siblings - 1
    return replace(
        tree,
        token_ids=torch.where(is_last, 2, tree.token_ids),
        kind=torch.where(is_last, int(CandidateKind.DETERMINISTIC), tree.kind),
    )


def _holed(tree: DraftTree) -> DraftTree:
    return replace(tree, is_valid=tree.is_valid & (tree.depth < 3))


@pytest.mark.parametrize("sampling", [no_processors(), PROCESSED], ids=["raw", "processed"])
@pytest.mark.parametrize("change", [lambda tree: tree, _mixed, _holed], ids=["", "mixed", "holed"])
@pytest.mark.parametrize("name", SHAPES)
def test_both_take_the_same_path_to_the_same_token(
    name: str, change: object, sampling: Sampling
) -> None:
    tables = Tables(VOCAB, components=2, seed=5)
    trees = [change(tree) for tree in _trees(SHAPES[name], tables, sampling)]  # type: ignore[operator]
    own_trees = [tree.sequence_tree() for tree in trees]
    count = trees[0].num_nodes + 1
    logits = torch.stack([logits_in_tree(tables, (0,), own) for own in own_trees])
    uniforms = torch.rand(
        BATCH, count, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    every = torch.arange(BATCH)
    got = accept_paths(
        joined(trees), lambda nodes: sampling.processed_probs(logits[every, nodes + 1]), uniforms
    )
    lengths = set()
    for index, own in enumerate(own_trees):
        probs = ProcessedDistribution(logits[index], [0], own, sampling)
        numbers = iter(uniforms[index].tolist())
        path, next_probs = accept_path(own, probs, lambda p, numbers=numbers: next(numbers) < p)
        assert [node for node in got.path[index].tolist() if node != ROOT] == path
        assert got.next_token[index].item() == sample_token(next_probs, next(numbers))
        lengths.add(len(path))
    assert bool(got.is_sound.all())
    assert max(lengths) > 0 or name == "chain"


@pytest.mark.parametrize("sampled_share", [0.0, 0.6, 1.0])
def test_both_accept_the_same_in_random_trees(sampled_share: float) -> None:
    source = RandomTrees(sampled_share=sampled_share)
    trees = [source.tree(seed) for seed in range(BATCH)]
    probs = torch.stack([source.target_probs(seed) for seed in range(BATCH)])
    generator = torch.Generator().manual_seed(1)
    lengths, every = set(), torch.arange(BATCH)
    for _ in range(4):
        uniforms = torch.rand(BATCH, source.nodes + 1, dtype=torch.float64, generator=generator)
        got = accept_paths(joined(trees), lambda nodes: probs[every, nodes + 1], uniforms)
        for index, tree in enumerate(trees):
            numbers = iter(uniforms[index].tolist())
            path, next_probs = accept_path(
                tree.sequence_tree(),
                lambda node, own=probs[index]: own[node + 1],
                lambda p, numbers=numbers: next(numbers) < p,
            )
            assert [node for node in got.path[index].tolist() if node != ROOT] == path
            assert got.next_token[index].item() == sample_token(next_probs, next(numbers))
            lengths.add(len(path))
        assert bool(got.is_sound.all())
    assert lengths >= {0, 1, 2}


def test_a_candidate_that_could_not_have_been_sampled_is_unsound() -> None:
    tables = Tables(VOCAB, components=1, seed=2)
    tree = _trees(SHAPES["sampled"], tables, no_processors())[0]
    assert tree.draft_probs is not None
    impossible = tree.draft_probs.probs * (tree.draft_probs.ids != tree.token_ids[0, 0])
    tree = replace(tree, draft_probs=SparseDistribution(tree.draft_probs.ids, impossible))
    target_probs = torch.full((1, VOCAB), 1 / VOCAB)
    uniforms = torch.full((1, tree.num_nodes + 1), 0.999, dtype=torch.float64)
    assert not bool(accept_paths(tree, lambda nodes: target_probs, uniforms).is_sound)


@pytest.mark.parametrize("where", ["candidate", "another token", "all"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -0.5])
def test_neither_accepts_by_invalid_draft_probs(where: str, wrong: float) -> None:
    tables = Tables(VOCAB, components=1, seed=2)
    tree = _trees(SHAPES["sampled"], tables, no_processors())[0]
    assert tree.draft_probs is not None
    own = tree.sequence_tree()
    is_first = tree.draft_probs.ids[0, 0] == own.token_ids[own.sampled[ROOT][0]]
    planted = {"candidate": is_first, "another token": ~is_first, "all": is_first | ~is_first}
    probs = tree.draft_probs.probs.clone()
    probs[0, 0, planted[where]] = wrong
    tree = replace(tree, draft_probs=SparseDistribution(tree.draft_probs.ids, probs))
    target_probs = torch.full((1, VOCAB), 1 / VOCAB)
    for uniform in (0.0, 0.5, 0.999):
        uniforms = torch.full((1, tree.num_nodes + 1), uniform, dtype=torch.float64)
        assert not bool(accept_paths(tree, lambda nodes: target_probs, uniforms).is_sound)
        with pytest.raises(DraftError, match="probability zero in the drafter's draft_probs"):
            accept_path(
                tree.sequence_tree(), lambda node: target_probs[0], lambda p, u=uniform: u < p
            )


@pytest.mark.parametrize("vocab", [2, 3, 9])
def test_both_take_the_same_greedy_path_to_the_same_token(vocab: int) -> None:
    source = RandomTrees(vocab=vocab)
    trees = [source.tree(seed) for seed in range(GREEDY_BATCH)]
    generator = torch.Generator().manual_seed(3)
    best = torch.randint(vocab, (GREEDY_BATCH, source.nodes + 1), generator=generator)
    path, next_token = accept_greedy_paths(joined(trees), best)
    lengths = set()
    for index, tree in enumerate(trees):
        tokens = best[index].tolist()
        own, token = accept_greedy_path(
            tree.sequence_tree(), lambda node, tokens=tokens: tokens[node + 1]
        )
        assert path[index].tolist() == own + [ROOT] * (path.shape[1] - len(own))
        assert next_token[index].item() == token
        lengths.add(len(own))
    assert lengths >= {0, 1, 2}
