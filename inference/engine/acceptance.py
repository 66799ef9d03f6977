"""Acceptance of a batch of verified trees, with few copies from the device to the host."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from inference.draft_tree import ROOT, DraftTree, SequenceTree
from inference.engine.accept import accept_greedy_path, accept_path, sample_token
from inference.engine.accept_batched import AcceptedPaths, accept_greedy_paths, accept_paths
from inference.engine.request import SequenceState
from inference.sampling.batch import BatchSampling
from inference.sampling.distribution import ProcessedDistribution
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import StepRandom
from jakiro.errors import DraftError, JakiroError, NumericalError, RequestError
from jakiro.utils.devices import indices_on


class AcceptResult(NamedTuple):
    """The outcome of verifying one sequence's tree."""

    tree: SequenceTree
    path: list[int]  # accepted nodes, from the first level down
    next_token: int  # bonus or recovered token, selected from the target's distribution
    distribution: ProcessedDistribution  # the target's distribution after each node
    # why the sequence cannot continue; its path is then empty, and its next token has no meaning
    error: JakiroError | None = None

    @property
    def visited(self) -> list[int]:
        """ROOT and the accepted nodes; each of them is followed by one emitted token."""
        return [ROOT, *self.path]


class AcceptedTokens(NamedTuple):
    """The outcome of verifying the trees of a batch, on the host and on the device."""

    results: list[AcceptResult]
    nodes: Int[Tensor, "batch depth"]  # accepted path of each sequence, padded with ROOT
    next_token: Int[Tensor, " batch"]

    @classmethod
    def of(cls, results: list[AcceptResult], device: torch.device) -> "AcceptedTokens":
        """Copy the outcomes to the device."""
        width = max(len(result.path) for result in results)
        rows = [
            [*result.path, *[ROOT] * (width - len(result.path)), result.next_token]
            for result in results
        ]
        copied = torch.tensor(rows, device=device)
        return cls(results, copied[:, :-1], copied[:, -1])

    def is_emitted(self, counts: Sequence[int]) -> bool:
        """Return whether all accepted nodes of every sequence were emitted."""
        pairs = zip(self.results, counts, strict=True)
        return all(len(result.path) < count for result, count in pairs)

    def is_in_order(self, counts: Sequence[int]) -> bool:
        """Return whether the emitted part of every path consists of the first nodes of the tree.

        The tokens of these nodes are then in the right slots of the cache.
        """
        pairs = zip(self.results, counts, strict=True)
        paths = (result.path[: count - 1] for result, count in pairs)
        return all(path == list(range(len(path))) for path in paths)


def accept_trees(
    tree: DraftTree,
    logits: Float[Tensor, "batch queries vocab"],
    sequences: Sequence[SequenceState],
    random: StepRandom,
) -> AcceptedTokens:
    """Return the outcome of accepting and rejecting candidates in each sequence's tree.

    The outcome of a sequence is an error if its tree cannot be verified: a `NumericalError` if the
    target's logits at a visited node are not finite, or processors leave no token there; a
    `DraftError` if a candidate is outside the target's vocabulary, or has probability zero in the
    drafter's `draft_probs`; a `RequestError` if a processor raises an exception. Other sequences
    are not affected.

    Sequences whose processors ignore the preceding tokens are accepted together on the device,
    however different their options are. The host reads from the device once for all of them.
    """
    each = [state.request.sampling for state in sequences]
    together = [index for index, own in enumerate(each) if needs_no_host(own)]
    if together and accepts_on_device(logits.device, len(together)):
        with suppress(RequestError):  # after this error, the sequences are accepted one by one
            accepted = accept_on_device(tree, logits, BatchSampling(each), random, together)
            return _with_others(tree, logits, sequences, random, accepted, together)
    return AcceptedTokens.of(_one_by_one(tree, logits, sequences, random), logits.device)


def accepts_on_device(device: torch.device, num_sequences: int) -> bool:
    """Return whether candidates are accepted on the device, if the processors allow this.

    For a single sequence on the CPU, the one-by-one code is faster, because it processes only the
    distributions of visited nodes.
    """
    return num_sequences > 1 or device.type != "cpu"


def needs_no_host(sampling: Sampling) -> bool:
    """Return whether tokens can be selected on the device.

    This is the case in greedy decoding without processors, and in sampling with processors that
    ignore the preceding tokens.
    """
    return sampling.is_unprocessed_greedy or (sampling.do_sample and sampling.is_prefix_free)


def never_waits(sampling: Sampling) -> bool:
    """Return whether tokens can be selected without waiting for the device.

    Only then can a decoding step start before the host has read the result of the previous one.
    """
    return needs_no_host(sampling) and not sampling.waits_for_device


def accept_on_device(
    tree: DraftTree,
    logits: Tensor,
    sampling: BatchSampling,
    random: StepRandom,
    indices: Sequence[int],
) -> AcceptedPaths:
    """Return the accepted paths, without waiting for the device.

    Args:
        indices: batch indices of the sequences to accept candidates of, whose options must satisfy
            `needs_no_host`. The outcome of all other sequences has no meaning.
    """
    greedy = [index for index in indices if not sampling.each[index].do_sample]
    sampled = [index for index in indices if sampling.each[index].do_sample]
    parts = []
    if greedy:
        parts.append((greedy, _greedy_paths(tree, logits, greedy)))
    if sampled:
        parts.append((sampled, _sampled_paths(tree, logits, sampling, random, sampled)))
    if len(parts[0][0]) == len(logits):
        return parts[0][1]
    path = tree.parent.new_full((len(logits), tree.max_depth), ROOT)
    whole = AcceptedPaths(path, path.new_zeros(len(path)), path.new_zeros(len(path)).bool())
    for own, accepted in parts:
        index = indices_on(logits.device, own)
        for destination, part in zip(whole, accepted, strict=True):
            destination.index_copy_(0, index, part)
    return whole


def _sampled_paths(
    tree: DraftTree,
    logits: Tensor,
    sampling: BatchSampling,
    random: StepRandom,
    indices: Sequence[int],
) -> AcceptedPaths:
    """Return the accepted paths of the sequences at these batch indices, which all sample."""
    uniforms = random.uniforms(tree.num_nodes + 1)
    every = torch.arange(len(logits), device=logits.device)
    if len(indices) < len(logits):
        every = indices_on(logits.device, indices)
        tree, sampling = tree.of_sequences(indices), sampling.of_sequences(indices)
        uniforms = uniforms[every]
    return accept_paths(
        tree, lambda nodes: sampling.processed_probs(logits[every, nodes + 1]), uniforms
    )


def _greedy_paths(tree: DraftTree, logits: Tensor, indices: Sequence[int]) -> AcceptedPaths:
    """Return the accepted paths of the sequences at these batch indices, all without processors."""
    index = None if len(indices) == len(logits) else indices_on(logits.device, indices)
    if index is None or 2 * len(indices) > len(logits):  # reading more is faster than copying
        highest, best = logits.max(dim=-1)
        if index is not None:
            highest, best = highest[index], best[index]
    else:
        highest, best = logits[index].max(dim=-1)
    own = tree if index is None else tree.of_sequences(indices)
    path, next_token = accept_greedy_paths(own, best)
    is_finite = highest.isfinite()
    is_sound = is_finite[:, 0] & is_finite.gather(1, path + 1).all(dim=1)
    return AcceptedPaths(path, next_token, is_sound)


def outcome_of(tree: DraftTree, accepted: AcceptedPaths) -> Int[Tensor, "batch fields"]:
    """Return the trees and their acceptance as integers, to be copied to the host at once.

    Args:
        accepted: accepted paths and next tokens.
    """
    ends = torch.stack((accepted.next_token, accepted.is_sound.long()), dim=1)
    return tree.packed(torch.cat((accepted.path, ends), dim=1))


def read_results(
    tree: DraftTree,
    outcome: list[list[int]],
    logits: Iterable[Tensor],
    sequences: Sequence[SequenceState],
    indices: Sequence[int],
) -> list[AcceptResult]:
    """Return the outcome of each sequence; a sequence that cannot be verified has an error."""
    trees, extra = tree.unpacked(outcome, indices)
    return _each(_unpacked, trees, logits, sequences, extra)


def _with_others(
    tree: DraftTree,
    logits: Tensor,
    sequences: Sequence[SequenceState],
    random: StepRandom,
    accepted: AcceptedPaths,
    together: Sequence[int],
) -> AcceptedTokens:
    """Return all outcomes, given those of the sequences at some batch indices.

    The outcomes of all other sequences are computed on the host.
    """
    outcome = outcome_of(tree, accepted).tolist()
    every = range(len(sequences))
    if len(together) == len(sequences):
        results = read_results(tree, outcome, logits, sequences, every)
        return AcceptedTokens(results, accepted.path, accepted.next_token)
    trees, extra = tree.unpacked(outcome)
    numbers = _uniforms(tree, sequences, random)
    results = []
    for index in every:
        is_read = index in together
        function, number = (_unpacked, extra[index]) if is_read else (_on_host, numbers[index])
        own = slice(index, index + 1)
        results += _each(function, trees[own], logits[own], sequences[own], [number])
    return AcceptedTokens.of(results, logits.device)


def _one_by_one(
    tree: DraftTree, logits: Tensor, sequences: Sequence[SequenceState], random: StepRandom
) -> list[AcceptResult]:
    """Return the outcome of each sequence, computed on the host; works with any processors.

    Unlike on the device, the processors may read the tokens on the path to a node.
    """
    if all(state.request.sampling.is_unprocessed_greedy for state in sequences):
        highest, best = logits.max(dim=-1)
        trees, extra = tree.to_host(torch.cat((best, highest.isfinite().long()), dim=1))
        return _each(_greedy, trees, logits, sequences, extra)
    trees, _ = tree.to_host()
    return _each(_on_host, trees, logits, sequences, _uniforms(tree, sequences, random))


def _uniforms(
    tree: DraftTree, sequences: Sequence[SequenceState], random: StepRandom
) -> list[list[float]]:
    """Return each sequence's random numbers on the host; none if no sequence samples."""
    if not any(state.request.sampling.do_sample for state in sequences):
        return [[]] * len(sequences)
    numbers: list[list[float]] = random.uniforms(tree.num_nodes + 1).tolist()
    return numbers


Numbers = list[int] | list[float]


def _each(
    accept: Callable[[SequenceTree, ProcessedDistribution, Any], AcceptResult],
    trees: Sequence[SequenceTree],
    logits: Iterable[Tensor],
    sequences: Sequence[SequenceState],
    numbers: Sequence[Numbers],
) -> list[AcceptResult]:
    """Return the outcome of each sequence; an error is the outcome of its sequence alone."""
    results = []
    for tree, own, state, more in zip(trees, logits, sequences, numbers, strict=True):
        distribution = ProcessedDistribution(own, state.token_ids, tree, state.request.sampling)
        try:
            _check_tokens(tree, vocab=own.shape[-1])
            results.append(accept(tree, distribution, more))
        except (NumericalError, DraftError, RequestError) as error:
            results.append(AcceptResult(tree, [], 0, distribution, error))
    return results


def _unpacked(
    tree: SequenceTree, distribution: ProcessedDistribution, integers: list[int]
) -> AcceptResult:
    """Return the outcome that was computed on the device.

    Args:
        integers: accepted nodes, padded with ROOT; the next token; and 1 if the outcome is valid.
    """
    *nodes, next_token, is_sound = integers
    path = [node for node in nodes if node != ROOT]
    result = AcceptResult(tree, path, next_token, distribution)
    if not is_sound:
        _explain(result)
    return result


def _greedy(
    tree: SequenceTree, distribution: ProcessedDistribution, integers: list[int]
) -> AcceptResult:
    """Return the outcome of greedy decoding without processors.

    Args:
        integers: best token of each query, followed by 1 or 0 for each query: whether its best
            logit is finite.
    """
    best_tokens, is_finite = integers[: len(integers) // 2], integers[len(integers) // 2 :]
    path, next_token = accept_greedy_path(tree, lambda node: best_tokens[node + 1])
    result = AcceptResult(tree, path, next_token, distribution)
    if not all(is_finite[node + 1] for node in result.visited):
        _explain(result)
    return result


def _on_host(
    tree: SequenceTree, distribution: ProcessedDistribution, numbers: list[float]
) -> AcceptResult:
    """Return the outcome with any processors; uniform random numbers are for sampling only."""
    if not distribution.sampling.do_sample:
        path, next_token = accept_greedy_path(tree, distribution.best)
        return AcceptResult(tree, path, next_token, distribution)
    uniforms = iter(numbers)
    path, next_probs = accept_path(
        tree, distribution, lambda probability: next(uniforms) < probability
    )
    return AcceptResult(tree, path, sample_token(next_probs, next(uniforms)), distribution)


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
