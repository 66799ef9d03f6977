"""Acceptance of a batch of verified trees, with few copies from the device to the host."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from inference.draft_tree import ROOT, DraftTree, SequenceTree
from inference.engine.accept import accept_greedy_path, accept_path, sample_token
from inference.engine.accept_batched import accept_paths
from inference.engine.request import SequenceState
from inference.sampling import ProcessedDistribution
from jakiro.errors import DraftError


class AcceptResult(NamedTuple):
    """The outcome of verifying one sequence's tree."""

    tree: SequenceTree
    path: list[int]  # accepted nodes, from the first level down
    next_token: int  # bonus or recovered token, selected from the target's distribution
    distribution: ProcessedDistribution  # the target's distribution after each node

    @property
    def visited(self) -> list[int]:
        """ROOT and the accepted nodes; each of them is followed by one emitted token."""
        return [ROOT, *self.path]


def accept_trees(
    tree: DraftTree,
    logits: Float[Tensor, "batch queries vocab"],
    sequences: Sequence[SequenceState],
) -> list[AcceptResult]:
    """Return the outcome of accepting and rejecting candidates in each sequence's tree.

    The random numbers of a sequence depend on its number of decoding steps.

    Args:
        tree: trees of all sequences.
        logits: the target's logits after the root and after each node.
        sequences: sequences being decoded.

    Raises:
        NumericalError: the target's logits at a visited node are not finite, or processors leave
            no token there.
        DraftError: a candidate is outside the target's vocabulary, or has probability zero in the
            drafter's `draft_probs`.
    """
    alike: defaultdict[object, list[int]] = defaultdict(list)
    for index, state in enumerate(sequences):
        alike[state.request.sampling.description].append(index)
    if len(alike) == 1:
        return _accept_alike(tree, logits, sequences)
    results: dict[int, AcceptResult] = {}
    for indices in alike.values():
        group = [sequences[index] for index in indices]
        accepted = _accept_alike(tree.of_sequences(indices), logits[indices], group)
        results.update(zip(indices, accepted, strict=True))
    return [results[index] for index in range(len(sequences))]


def _accept_alike(
    tree: DraftTree, logits: Tensor, sequences: Sequence[SequenceState]
) -> list[AcceptResult]:
    """Return the outcomes of sequences whose tokens are selected in the same way."""
    sampling = sequences[0].request.sampling
    if sampling.is_unprocessed_greedy:
        return _greedily(tree, logits, sequences)
    # For a single sequence on the CPU, the one-by-one code is faster, because it processes only the
    # distributions of visited nodes.
    is_wide = len(sequences) > 1 or logits.device.type != "cpu"
    if is_wide and sampling.do_sample and sampling.is_prefix_free:
        return _together(tree, logits, sequences)
    return _one_by_one(tree, logits, sequences)


def _greedily(
    tree: DraftTree, logits: Tensor, sequences: Sequence[SequenceState]
) -> list[AcceptResult]:
    highest, best = logits.max(dim=-1)
    trees, extra = tree.to_host(torch.cat((best, highest.isfinite().long()), dim=1))
    distributions = _distributions(trees, logits, sequences)
    each = zip(trees, distributions, extra, strict=True)
    return [_greedy(own, distribution, integers) for own, distribution, integers in each]


def _greedy(
    tree: SequenceTree, distribution: ProcessedDistribution, integers: list[int]
) -> AcceptResult:
    """Return the outcome of greedy decoding for one sequence.

    Args:
        tree: tree of the sequence.
        distribution: the target's distributions.
        integers: best token of each query, followed by 1 or 0 for each query: whether its best
            logit is finite.
    """
    best_tokens, is_finite = integers[: len(integers) // 2], integers[len(integers) // 2 :]
    path, next_token = accept_greedy_path(tree, lambda node: best_tokens[node + 1])
    result = AcceptResult(tree, path, next_token, distribution)
    if not all(is_finite[node + 1] for node in result.visited):
        _explain(result)
    return result


def _together(
    tree: DraftTree, logits: Tensor, sequences: Sequence[SequenceState]
) -> list[AcceptResult]:
    every = torch.arange(len(sequences), device=logits.device)
    sampling = sequences[0].request.sampling
    count = tree.num_nodes + 1
    uniforms = [state.uniforms(count) for state in sequences]
    accepted = accept_paths(
        tree,
        lambda nodes: sampling.processed_probs(logits[every, nodes + 1]),
        torch.stack(uniforms).to(logits.device),
    )
    ends = torch.stack((accepted.next_token, accepted.is_sound.long()), dim=1)
    trees, extra = tree.to_host(torch.cat((accepted.path, ends), dim=1))
    distributions = _distributions(trees, logits, sequences)
    results = []
    for own, distribution, integers in zip(trees, distributions, extra, strict=True):
        *nodes, next_token, is_sound = integers
        path = [node for node in nodes if node != ROOT]
        result = AcceptResult(own, path, next_token, distribution)
        if not is_sound:
            _explain(result)
        results.append(result)
    return results


def _one_by_one(
    tree: DraftTree, logits: Tensor, sequences: Sequence[SequenceState]
) -> list[AcceptResult]:
    """Return the outcome of each sequence, computed separately.

    Unlike in `_together`, any processors are allowed, also those that read the path to a node.
    """
    trees, _ = tree.to_host()
    distributions = _distributions(trees, logits, sequences)
    each = zip(trees, distributions, sequences, strict=True)
    return [_alone(own, distribution, state) for own, distribution, state in each]


def _alone(
    tree: SequenceTree, distribution: ProcessedDistribution, state: SequenceState
) -> AcceptResult:
    if not distribution.sampling.do_sample:
        return AcceptResult(tree, *accept_greedy_path(tree, distribution.best), distribution)
    uniforms = iter(state.uniforms(len(tree.token_ids) + 1).tolist())
    path, next_probs = accept_path(
        tree, distribution, lambda probability: next(uniforms) < probability
    )
    return AcceptResult(tree, path, sample_token(next_probs, next(uniforms)), distribution)


def _distributions(
    trees: Sequence[SequenceTree], logits: Tensor, sequences: Sequence[SequenceState]
) -> list[ProcessedDistribution]:
    for tree in trees:
        _check_tokens(tree, vocab=logits.shape[-1])
    return [
        ProcessedDistribution(own, state.token_ids, tree, state.request.sampling)
        for tree, own, state in zip(trees, logits, sequences, strict=True)
    ]


def _check_tokens(tree: SequenceTree, vocab: int) -> None:
    valid = [node for siblings in tree.children.values() for node in siblings]
    if wrong := [tree.token_ids[node] for node in valid if not 0 <= tree.token_ids[node] < vocab]:
        raise DraftError(
            "the drafter proposed a token id outside the target's vocabulary",
            expected=f"ids from 0 to {vocab - 1}",
            got=wrong[0],
            remedy="use a drafter with the target's vocabulary",
        )


def _explain(result: AcceptResult) -> None:
    """Raise the error that explains why an outcome is invalid."""
    for node in result.visited:
        result.distribution.best(node)
    raise DraftError(
        "a sampled draft token has probability zero in the drafter's draft_probs",
        expected="token ids that were sampled without replacement from draft_probs",
        got=[result.tree.token_ids[node] for node in result.path],
        remedy="record the distribution that the drafter samples from",
    )
