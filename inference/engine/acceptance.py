"""Acceptance of a batch of verified trees, with few copies from the device to the host."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from inference.draft_tree import ROOT, DraftTree, SequenceTree
from inference.engine.accept import accept_greedy_path, accept_path, sample_token
from inference.engine.accept_batched import AcceptedPaths, accept_greedy_paths, accept_paths
from inference.engine.request import SequenceState
from inference.sampling.batch import BatchSampling
from inference.sampling.options import Sampling, widened
from inference.sampling.random_numbers import StepRandom
from jakiro.errors import DraftError, JakiroError, NumericalError, RequestError
from jakiro.utils.devices import indices_on


class ProcessedDistribution:
    """The target's processed distribution after each node, given the path to that node.

    Args:
        emitted: all tokens up to and including the root; later, more tokens may be appended to
            this list.
    """

    def __init__(
        self,
        logits: Float[Tensor, "queries vocab"],
        emitted: list[int],
        tree: SequenceTree,
        sampling: Sampling,
    ) -> None:
        self.logits = logits
        self.emitted = emitted
        self.length = len(emitted)
        self.tree = tree
        self.sampling = sampling

    def __call__(self, node: int) -> Float[Tensor, " vocab"]:
        """Return the distribution after `node` (or ROOT), in float32 or higher precision."""
        probs = self.sampling.probs(self.scores(node)[None])[0]
        _check_finite(probs, self.raw(node), position=self.position(node))
        return probs

    def best(self, node: int) -> int:
        scores, token = self.scores(node).max(dim=-1)
        _check_finite(scores, self.raw(node), position=self.position(node))
        return int(token)

    def position(self, node: int) -> int:
        return self.length + len(self.tree.path(node))

    def raw(self, node: int) -> Float[Tensor, " vocab"]:
        return self.logits[node + 1]

    def scores(self, node: int) -> Float[Tensor, " vocab"]:
        return self.sampling.processed(self._prefix(node), widened(self.raw(node)[None]))[0]

    def _prefix(self, node: int) -> Int[Tensor, "1 tokens"]:
        if self.sampling.is_prefix_free:
            return torch.empty(1, 0, dtype=torch.long, device=self.logits.device)
        drafted = [self.tree.token_ids[index] for index in self.tree.path(node)]
        return torch.tensor([[*self.emitted[: self.length], *drafted]], device=self.logits.device)


class AcceptResult(NamedTuple):
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
    however different their options are, and the host reads from the device once for all of them.
    All others are accepted on the host, one by one.
    """
    options = [state.request.sampling for state in sequences]
    together = [index for index, sampling in enumerate(options) if needs_no_host(sampling)]
    accepted: AcceptedPaths | None = None
    if together and accepts_on_device(logits.device, len(together)):
        with suppress(RequestError):  # the sequences are then accepted one by one
            accepted = accept_on_device(tree, logits, BatchSampling(options), random, together)
    if accepted is not None and len(together) == len(sequences):
        outcome = outcome_of(tree, accepted).tolist()
        results = read_results(tree, outcome, logits, sequences, together)
        return AcceptedTokens(results, accepted.path, accepted.next_token)
    packed = tree.packed() if accepted is None else outcome_of(tree, accepted)
    trees, integers = tree.unpacked(packed.tolist())
    uniforms: list[list[float]] = [[]] * len(sequences)
    if any(sampling.do_sample for sampling in options):
        uniforms = random.uniforms(tree.num_nodes + 1).tolist()
    results = []
    for index, state in enumerate(sequences):
        if accepted is not None and index in together:
            accept: _Accept = partial(_from_device, integers=integers[index])
        else:
            accept = partial(_on_host, uniforms=uniforms[index])
        results.append(_outcome(accept, trees[index], logits[index], state))
    return AcceptedTokens.of(results, logits.device)


def accepts_on_device(device: torch.device, num_sequences: int) -> bool:
    """Return whether candidates are accepted on the device, if the processors allow this.

    For a single sequence on the CPU, the one-by-one code is faster, because it processes only the
    distributions of visited nodes.
    """
    return num_sequences > 1 or device.type != "cpu"


def needs_no_host(sampling: Sampling) -> bool:
    """Return whether tokens can be selected on the device.

    Only then can a decoding step start before the host has read the result of the previous one.
    This is the case in greedy decoding without processors, and in sampling with processors that
    ignore the preceding tokens.
    """
    return sampling.is_unprocessed_greedy or (sampling.do_sample and sampling.is_prefix_free)


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
    for members, accepted in parts:
        index = indices_on(logits.device, members)
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
    if len(indices) < len(logits):
        tree, logits = tree.of_sequences(indices), logits[indices_on(logits.device, indices)]
    highest, best = logits.max(dim=-1)
    path, next_token = accept_greedy_paths(tree, best)
    is_finite = highest.isfinite()
    is_sound = is_finite[:, 0] & is_finite.gather(1, path + 1).all(dim=1)
    return AcceptedPaths(path, next_token, is_sound)


def outcome_of(tree: DraftTree, accepted: AcceptedPaths) -> Int[Tensor, "batch fields"]:
    """Return the trees and their acceptance as integers, to be copied to the host at once."""
    ends = torch.stack((accepted.next_token, accepted.is_sound.long()), dim=1)
    return tree.packed(torch.cat((accepted.path, ends), dim=1))


def read_results(
    tree: DraftTree,
    outcome: list[list[int]],
    logits: Iterable[Tensor],
    sequences: Sequence[SequenceState],
    indices: Sequence[int],
) -> list[AcceptResult]:
    """Return the outcome of each sequence; a sequence that cannot be verified has an error.

    Args:
        outcome: integers of `outcome_of`, of the sequences at the batch indices `indices`.
    """
    trees, integers = tree.unpacked(outcome, indices)
    return [
        _outcome(partial(_from_device, integers=numbers), host_tree, sequence_logits, state)
        for numbers, host_tree, sequence_logits, state in zip(
            integers, trees, logits, sequences, strict=True
        )
    ]


_Accept = Callable[[SequenceTree, ProcessedDistribution], AcceptResult]


def _outcome(
    accept: _Accept, tree: SequenceTree, logits: Tensor, state: SequenceState
) -> AcceptResult:
    distribution = ProcessedDistribution(logits, state.token_ids, tree, state.request.sampling)
    try:
        _check_tokens(tree, vocab=logits.shape[-1])
        return accept(tree, distribution)
    except (NumericalError, DraftError, RequestError) as error:
        return AcceptResult(tree, [], 0, distribution, error)


def _from_device(
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


def _on_host(
    tree: SequenceTree, distribution: ProcessedDistribution, uniforms: list[float]
) -> AcceptResult:
    """Return the outcome with any processors, which may read the tokens on the path to a node."""
    if not distribution.sampling.do_sample:
        path, next_token = accept_greedy_path(tree, distribution.best)
        return AcceptResult(tree, path, next_token, distribution)
    numbers = iter(uniforms)
    path, next_probs = accept_path(
        tree, distribution, lambda probability: next(numbers) < probability
    )
    return AcceptResult(tree, path, sample_token(next_probs, next(numbers)), distribution)


def _check_finite(values: Tensor, logits: Float[Tensor, " vocab"], position: int) -> None:
    """Raise an error if the largest value is not finite; the message names the cause."""
    if bool(values.max().isfinite()):
        return
    if bool(logits.isnan().any() | logits.isposinf().any() | logits.isneginf().all()):
        raise NumericalError(
            f"the target's logits for position {position} are not finite",
            expected="finite numbers, or -inf for tokens that cannot follow",
            got="NaN or inf",
            remedy="load the target in float32 or bfloat16, and check its weights",
        )
    raise NumericalError(
        f"the logits processors leave no token for position {position}",
        expected="at least one token with a finite score",
        got="none",
        remedy="relax the processors or constraints",
    )


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
    for node in result.visited:
        result.distribution.best(node)
    raise DraftError(
        "a sampled draft token has probability zero in the drafter's draft_probs",
        expected="token ids that were sampled without replacement from draft_probs",
        got=[result.tree.token_ids[node] for node in result.path],
        remedy="record the distribution that the drafter samples from",
    )
