"""Sampling options, processed distributions of target and drafter, and seeded random numbers."""

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from inference.draft_tree import SequenceTree
from jakiro.errors import NumericalError
from jakiro.utils.nucleus import filter_nucleus

# These processors never read the preceding tokens, so they may process many distributions at once,
# including draft distributions. Subclasses are excluded, because they may read the tokens.
PREFIX_FREE = frozenset(
    {
        EpsilonLogitsWarper,
        EtaLogitsWarper,
        InfNanRemoveLogitsProcessor,
        LogitNormalization,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
        TypicalLogitsWarper,
    }
)


@dataclass(frozen=True)
class Sampling:
    """A request's sampling options: logits processors, sampling or greedy decoding, and seed."""

    processors: LogitsProcessorList
    do_sample: bool
    seed: int = 0
    batch_index: int = 0  # determines the random numbers, like the seed
    request_index: int = 0  # number of the request if requests are learned from, otherwise 0

    @property
    def is_unprocessed_greedy(self) -> bool:
        """Whether the next token is simply the token with the largest raw logit."""
        return not self.do_sample and not self.processors

    @property
    def is_prefix_free(self) -> bool:
        """Whether all processors are known to ignore the preceding tokens."""
        return all(type(processor) in PREFIX_FREE for processor in self.processors)

    @cached_property
    def description(self) -> tuple[bool, tuple[str, ...]]:
        """Whether tokens are sampled, and all processors, with settings if they ignore the prefix.

        If two requests have the same description and their processors ignore the prefix, then the
        processors of one request can process the distributions of the other.
        """
        return self.do_sample, tuple(map(_described, self.processors))

    def __str__(self) -> str:
        """Return the way in which tokens are selected, in words."""
        _, processors = self.description
        return ", ".join(("sampling" if self.do_sample else "greedy decoding", *processors))

    def processed_probs(self, logits: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
        """Return probabilities after the processors, in float32 or higher precision.

        All processors must be prefix-free. In greedy decoding, each distribution is a point mass.
        """
        no_prefix = torch.empty(len(logits), 0, dtype=torch.long, device=logits.device)
        return self.probs(self.processed(no_prefix, widened(logits)))

    def processed(
        self, prefix: Int[Tensor, "n tokens"], scores: Float[Tensor, "n vocab"]
    ) -> Float[Tensor, "n vocab"]:
        """Return the scores after all processors.

        Args:
            prefix: tokens before each distribution.
            scores: logits, which may be overwritten.
        """
        if not self.is_prefix_free:  # unknown processors may take further arguments
            processed: Tensor = self.processors(prefix, scores)  # type: ignore[arg-type]
            return processed
        for processor in self.processors:
            scores = _applied(processor, prefix, scores)
        return scores

    def probs(self, scores: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
        """Return the probabilities that tokens are sampled from, given processed logits."""
        if self.do_sample:
            return scores.softmax(dim=-1)
        return torch.zeros_like(scores).scatter_(1, scores.argmax(dim=-1, keepdim=True), 1.0)

    def processed_draft(self, log_probs: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
        """Return draft distributions after the request's prefix-free processors, renormalized.

        `log_probs` are returned unchanged if there are no such processors, and in greedy decoding,
        where they only rank candidates. Otherwise, distributions that are not finite are not
        processed, because some processors would fail on such distributions; all their tokens get
        probability 0.
        """
        warpers = [processor for processor in self.processors if type(processor) in PREFIX_FREE]
        if not self.do_sample or not warpers:
            return log_probs
        no_prefix = torch.empty(len(log_probs), 0, dtype=torch.long, device=log_probs.device)
        is_finite = log_probs.amax(dim=-1, keepdim=True).isfinite()
        log_probs = log_probs.where(is_finite, 0.0)
        for warper in warpers:
            log_probs = _applied(warper, no_prefix, log_probs)
        return log_probs.log_softmax(dim=-1).where(is_finite, -torch.inf)

    def uniforms(self, step_id: int, count: int) -> Float[Tensor, " count"]:
        """Return random numbers in [0, 1) on the CPU, from `generator(step_id)`.

        Args:
            step_id: number of the decoding step.
            count: number of random numbers.
        """
        return torch.rand(count, dtype=torch.float64, generator=self.generator(step_id))

    def generator(self, step_id: int, purpose: int = 0) -> torch.Generator:
        """Return a CPU generator seeded by (seed, batch index, request index, step, purpose).

        Args:
            step_id: number of the decoding step.
            purpose: number of a stream of random numbers in the same step; 0 for acceptance.
        """
        key = ((self.seed * 1_000_003 + self.batch_index) * 1_000_003 + step_id) * 7 + purpose
        if self.request_index:  # hashed, so that every combination of numbers has a different key
            hashed = blake2b(f"{self.request_index} {key}".encode(), digest_size=8)
            key = int.from_bytes(hashed.digest())
        return torch.Generator().manual_seed(key % (1 << 63))


def _described(processor: LogitsProcessor) -> str:
    """Return the type of a processor, with the exact settings of one that ignores the prefix."""
    name = type(processor).__name__
    if type(processor) not in PREFIX_FREE:
        return name
    settings = {
        key: value.tolist() if isinstance(value, Tensor) else value
        for key, value in vars(processor).items()
    }
    return f"{name}{sorted(settings.items())}"


def _applied(processor: LogitsProcessor, prefix: Tensor, scores: Tensor) -> Tensor:
    if type(processor) is TopPLogitsWarper and scores.device.type == "cpu":
        return filter_nucleus(processor, scores)
    processed: Tensor = processor(prefix, scores)
    return processed


def widened(logits: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
    """Return a copy of logits in float32 or higher precision, which processors may overwrite."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)


class ProcessedDistribution:
    """The target's processed distribution after each node, given the path to that node.

    Args:
        logits: raw target logits after the root (index 0) and after node n (index n + 1).
        emitted: all tokens up to and including the root; later, more tokens may be appended to
            this list.
        tree: tree of the sequence.
        sampling: sampling options; in greedy decoding, each distribution is a point mass.
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
        """Return the distribution after `node` (or ROOT), in float32 or higher precision.

        Raises:
            NumericalError: logits are not finite, or processors leave no token.
        """
        probs = self.sampling.probs(self.scores(node)[None])[0]
        check_finite(probs, self.raw(node), position=self.position(node))
        return probs

    def best(self, node: int) -> int:
        """Return the most likely token after `node` (or ROOT).

        Raises:
            NumericalError: logits are not finite, or processors leave no token.
        """
        scores, token = self.scores(node).max(dim=-1)
        check_finite(scores, self.raw(node), position=self.position(node))
        return int(token)

    def position(self, node: int) -> int:
        """Return the position of the token that follows `node` (or ROOT)."""
        return self.length + len(self.tree.path(node))

    def raw(self, node: int) -> Float[Tensor, " vocab"]:
        """Return the target's raw logits after `node` (or ROOT)."""
        return self.logits[node + 1]

    def scores(self, node: int) -> Float[Tensor, " vocab"]:
        """Return the processed logits after `node` (or ROOT)."""
        return self.sampling.processed(self._prefix(node), widened(self.raw(node)[None]))[0]

    def _prefix(self, node: int) -> Int[Tensor, "1 tokens"]:
        if self.sampling.is_prefix_free:
            return torch.empty(1, 0, dtype=torch.long, device=self.logits.device)
        drafted = [self.tree.token_ids[index] for index in self.tree.path(node)]
        return torch.tensor([[*self.emitted[: self.length], *drafted]], device=self.logits.device)


def check_finite(values: Tensor, logits: Float[Tensor, " vocab"], position: int) -> None:
    """Raise an error if the largest value is not finite; the message names the cause.

    Args:
        values: probabilities or processed logits; only the largest must be finite.
        logits: the target's raw logits that the values were computed from.
        position: position of the token that the values are for.

    Raises:
        NumericalError: the largest value is not a finite number.
    """
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
