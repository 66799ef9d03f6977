"""Decides what is accepted of a batch of verified trees, with one copy off the device."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from inference.draft_tree import ROOT, DraftTree, TreeRow
from inference.engine.accept import accept_greedy_path, accept_path, draw
from inference.engine.accept_batched import accept_paths
from inference.engine.request import SequenceState
from inference.sampling import ProcessedDistribution
from jakiro.errors import DraftError


class AcceptResult(NamedTuple):
    """What verification made of one sequence's tree."""

    row: TreeRow
    path: list[int]  # accepted nodes, from the first level down
    next_token: int  # supplied by the target itself
    distribution: ProcessedDistribution  # at visited nodes

    @property
    def visited(self) -> list[int]:
        """The nodes whose laws decided: ROOT and the path; the i-th emitted token follows each."""
        return [ROOT, *self.path]


def accept_trees(
    tree: DraftTree,
    logits: Float[Tensor, "batch queries vocab"],
    sequences: Sequence[SequenceState],
    step_id: int,
) -> list[AcceptResult]:
    """Return the verdict on each sequence's tree.

    Args:
        tree: the candidates.
        logits: the target's, after the root and after each node.
        sequences: whose trees these are.
        step_id: with seed and row, the key of the random numbers.

    Raises:
        NumericalError: a law that decides is not finite.
        DraftError: a candidate is no token of the target, or could not have been drawn.
    """
    samplings = [one.request.sampling for one in sequences]
    if all(one.is_plain_greedy for one in samplings):
        return _greedily(tree, logits, sequences)
    first = samplings[0]
    alike = all(one.processors is first.processors for one in samplings)
    # For one sequence on the CPU, where looking is free, a walk that stops early is faster.
    is_wide = len(sequences) > 1 or logits.device.type != "cpu"
    if is_wide and first.do_sample and first.is_prefix_free and alike:
        return _together(tree, logits, sequences, step_id)
    return _one_by_one(tree, logits, sequences, step_id)


def _greedily(
    tree: DraftTree, logits: Tensor, sequences: Sequence[SequenceState]
) -> list[AcceptResult]:
    highest, best = logits.max(dim=-1)
    rows, extra = tree.rows(torch.cat((best, highest.isfinite().long()), dim=1))
    distributions = _distributions(rows, logits, sequences)
    each = zip(rows, distributions, extra, strict=True)
    return [_greedy(row, distribution, facts) for row, distribution, facts in each]


def _greedy(row: TreeRow, distribution: ProcessedDistribution, facts: list[int]) -> AcceptResult:
    """Return a greedy verdict, given each query's best token and whether its logit is finite."""
    best_tokens, is_finite = facts[: len(facts) // 2], facts[len(facts) // 2 :]
    result = AcceptResult(
        row, *accept_greedy_path(row, lambda node: best_tokens[node + 1]), distribution
    )
    if not all(is_finite[node + 1] for node in result.visited):
        _explain(result)
    return result


def _together(
    tree: DraftTree, logits: Tensor, sequences: Sequence[SequenceState], step_id: int
) -> list[AcceptResult]:
    every = torch.arange(len(sequences), device=logits.device)
    sampling = sequences[0].request.sampling
    count = tree.num_nodes + 1
    uniforms = [one.request.sampling.uniforms(step_id, count) for one in sequences]
    accepted = accept_paths(
        tree,
        lambda nodes: sampling.processed_probs(logits[every, nodes + 1]),
        torch.stack(uniforms).to(logits.device),
    )
    ends = torch.stack((accepted.next_token, accepted.is_sound.long()), dim=1)
    rows, extra = tree.rows(torch.cat((accepted.path, ends), dim=1))
    results = []
    for row, distribution, facts in zip(
        rows, _distributions(rows, logits, sequences), extra, strict=True
    ):
        *path, next_token, is_sound = facts
        result = AcceptResult(
            row, [node for node in path if node != ROOT], next_token, distribution
        )
        if not is_sound:
            _explain(result)
        results.append(result)
    return results


def _one_by_one(
    tree: DraftTree, logits: Tensor, sequences: Sequence[SequenceState], step_id: int
) -> list[AcceptResult]:
    """Judge sequence by sequence: for processors that look at each node's own path."""
    rows, _ = tree.rows(tree.token_ids[:, :0])
    return [
        _alone(row, distribution, step_id)
        for row, distribution in zip(rows, _distributions(rows, logits, sequences), strict=True)
    ]


def _alone(row: TreeRow, distribution: ProcessedDistribution, step_id: int) -> AcceptResult:
    sampling = distribution.sampling
    if not sampling.do_sample:
        return AcceptResult(row, *accept_greedy_path(row, distribution.best), distribution)
    uniforms = iter(sampling.uniforms(step_id, len(row.token_ids) + 1).tolist())
    path, next_probs = accept_path(
        row, distribution, lambda probability: next(uniforms) < probability
    )
    return AcceptResult(row, path, draw(next_probs, next(uniforms)), distribution)


def _distributions(
    rows: Sequence[TreeRow], logits: Tensor, sequences: Sequence[SequenceState]
) -> list[ProcessedDistribution]:
    for row in rows:
        _check_tokens(row, vocab=logits.shape[-1])
    return [
        ProcessedDistribution(own, one.token_ids, row, one.request.sampling)
        for row, own, one in zip(rows, logits, sequences, strict=True)
    ]


def _check_tokens(row: TreeRow, vocab: int) -> None:
    valid = [node for siblings in row.children.values() for node in siblings]
    if wrong := [row.token_ids[node] for node in valid if not 0 <= row.token_ids[node] < vocab]:
        raise DraftError(
            "the drafter proposes what is no token of the target",
            expected=f"ids from 0 to {vocab - 1}",
            got=wrong[0],
            remedy="use a drafter with the target's own vocabulary",
        )


def _explain(result: AcceptResult) -> None:
    """Raise the error that makes a verdict worthless."""
    for node in result.visited:
        result.distribution.best(node)
    raise DraftError(
        "a drawn candidate has no probability under the draft law that is said to be its own",
        expected="siblings drawn without replacement from the recorded law",
        got=[result.row.token_ids[node] for node in result.path],
        remedy="record the law that the drafter draws from",
    )
