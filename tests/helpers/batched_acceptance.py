"""The exact distribution of batched acceptance, from runs with chosen random numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from unittest.mock import patch

import torch
from helpers.branching import Chooser, distribution_of
from helpers.tables import Prefix, Tables, logits_in_tree
from torch import Tensor

from inference.draft_tree import ROOT, DraftTree
from inference.engine import accept_batched
from inference.engine.siblings import Checks, Siblings, Support
from inference.sampling.options import Sampling


@dataclass(frozen=True)
class _Run:
    """One run of `accept_paths`."""

    accept_probs: list[float]
    path: list[int]
    next_probs: list[float]


def batched(
    tables: Tables, sampling: Sampling, prefix: Prefix, tree: DraftTree
) -> dict[Prefix, float]:
    """Return the exact distribution of the tokens that `accept_paths` emits for a given tree."""
    own = tree.sequence_tree()
    probs = sampling.processed_probs(logits_in_tree(tables, prefix, own))
    run = cache(lambda uniforms: _run(tree, lambda nodes: probs[nodes + 1], uniforms))

    def experiment(chooser: Chooser) -> Prefix:
        uniforms: tuple[float, ...] = ()
        while len(uniforms) < len(run(uniforms).accept_probs):
            accept_prob = min(run(uniforms).accept_probs[len(uniforms)], 1.0)
            is_accepted = chooser.accept(accept_prob)
            uniforms = (*uniforms, 0.0 if is_accepted else (1 + accept_prob) / 2)
        last = chooser.choose(run(uniforms).next_probs)
        return (*(own.token_ids[node] for node in run(uniforms).path), last)

    return distribution_of(experiment)


def _run(
    tree: DraftTree, target_probs: Callable[[Tensor], Tensor], uniforms: tuple[float, ...]
) -> _Run:
    """Return the outcome for these random numbers; all further random numbers are 0."""
    levels: list[tuple[Siblings, Checks]] = []
    weights: list[Tensor] = []
    check_siblings, sample_tokens = accept_batched.check_siblings, accept_batched._sample_tokens

    def noted_checks(support: Support, siblings: Siblings) -> Checks:
        levels.append((siblings, check_siblings(support, siblings)))
        return levels[-1][1]

    def noted_weights(own: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        weights.append(own)
        return sample_tokens(own, uniform)

    numbers = torch.zeros(1, tree.num_nodes + 1, dtype=torch.float64)
    numbers[0, : len(uniforms)] = torch.tensor(uniforms, dtype=torch.float64)
    with (
        patch.object(accept_batched, "check_siblings", noted_checks),
        patch.object(accept_batched, "_sample_tokens", noted_weights),
    ):
        accepted = accept_batched.accept_paths(tree, target_probs, numbers)
    assert bool(accepted.is_sound.all())
    path = [node for node in accepted.path[0].tolist() if node != ROOT]
    return _Run(_performed(levels, path), path, _normalized(weights[0][0]).tolist())


def _normalized(weights: Tensor) -> Tensor:
    """Return the distribution from which `accept_paths` samples; without any mass, token 0."""
    if weights.sum() == 0:
        return torch.eye(len(weights), dtype=weights.dtype)[0]
    return weights / weights.sum()


def _performed(levels: list[tuple[Siblings, Checks]], path: list[int]) -> list[float]:
    """Return the probabilities of acceptance up to the accepted child of each level."""
    performed: list[float] = []
    for siblings, checks in levels:
        pairs = zip(siblings.node[0].tolist(), checks.accept_prob[0].tolist(), strict=True)
        for node, accept_prob in pairs:
            if node == ROOT:
                break
            performed.append(accept_prob)
            if node in path:
                break
    return performed
