"""Greedy acceptance on the device gives the paths of acceptance on the host."""

import pytest
import torch
from helpers.operations import OperationCounter
from helpers.random_trees import RandomTrees, joined

from inference.draft_tree import ROOT, DraftTree
from inference.engine.accept import accept_greedy_path
from inference.engine.accept_greedy import accept_greedy_paths

BATCH = 80


@pytest.mark.parametrize("vocab", [2, 3, 9])
def test_both_take_the_same_greedy_path_to_the_same_token(vocab: int) -> None:
    source = RandomTrees(vocab=vocab)
    trees = [source.tree(seed) for seed in range(BATCH)]
    generator = torch.Generator().manual_seed(3)
    best = torch.randint(vocab, (BATCH, source.nodes + 1), generator=generator)
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


def test_a_tree_without_candidates_gives_the_best_token_after_the_root() -> None:
    path, next_token = accept_greedy_paths(
        DraftTree.empty(torch.tensor([4, 7])), torch.tensor([[5], [6]])
    )
    assert path.shape == (2, 0)
    assert next_token.tolist() == [5, 6]


def test_greedy_acceptance_of_four_levels_takes_few_operations() -> None:
    tree = RandomTrees().tree(0)
    best = torch.zeros(1, tree.num_nodes + 1, dtype=torch.long)
    with OperationCounter() as counter:
        accept_greedy_paths(tree, best)
    assert counter.total <= 22, counter.counts
