"""The target's processed law at visited nodes, the draft law's shaping, and keyed chance."""

from dataclasses import dataclass
from hashlib import blake2b

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from inference.draft_tree import TreeRow
from jakiro.errors import NumericalError

# These look at one law alone, never at the tokens before it: they may run on many laws at once, and
# shape draft laws, too. Exactly these: what derives from them may look at anything.
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
    """How a law becomes a token: Hugging Face processors, and whether to draw or take the best."""

    processors: LogitsProcessorList
    do_sample: bool
    seed: int = 0
    row: int = 0  # place in the batch; with the seed, the key of all chance
    request_index: int = (
        0  # of the requests by which a drafter has learnt; 0 for one that never does
    )

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the next token is simply the largest raw logit."""
        return not self.do_sample and not self.processors

    @property
    def is_prefix_free(self) -> bool:
        """Whether no processor looks at the tokens before the law that it shapes."""
        return all(type(one) in PREFIX_FREE for one in self.processors)

    def processed_probs(self, logits: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
        """Return the probabilities that prefix-free processors make of logits.

        In float32 or better; at temperature 0 a point mass.
        """
        no_prefix = torch.empty(len(logits), 0, dtype=torch.long, device=logits.device)
        scores: Tensor = self.processors(no_prefix, widened(logits))  # type: ignore[arg-type]
        return self.probs(scores)

    def probs(self, scores: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
        """Return the probabilities that tokens are drawn from, given processed scores."""
        if self.do_sample:
            return scores.softmax(dim=-1)
        return torch.zeros_like(scores).scatter_(1, scores.argmax(dim=-1, keepdim=True), 1.0)

    def processed_draft(self, log_probs: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
        """Return draft laws after the same warpers that shape the target's, renormalised.

        At temperature 0 the draft law is kept as it is: it only ranks candidates there. What is not
        finite, which some warpers refuse, becomes a law in which nothing is possible.
        """
        warpers = [one for one in self.processors if type(one) in PREFIX_FREE]
        if not self.do_sample or not warpers:
            return log_probs
        no_prefix = torch.empty(len(log_probs), 0, dtype=torch.long, device=log_probs.device)
        is_finite = log_probs.amax(dim=-1, keepdim=True).isfinite()
        log_probs = log_probs.where(is_finite, 0.0)
        for warper in warpers:
            log_probs = warper(no_prefix, log_probs)
        return log_probs.log_softmax(dim=-1).where(is_finite, -torch.inf)

    def uniforms(self, step_id: int, count: int) -> Float[Tensor, " count"]:
        """Return numbers in [0, 1), on the CPU, that depend on (seed, row, turn, round) alone."""
        return torch.rand(count, dtype=torch.float64, generator=self.generator(step_id))

    def generator(self, step_id: int, purpose: int = 0) -> torch.Generator:
        """Return a CPU generator keyed by (seed, row, turn, round, purpose)."""
        key = ((self.seed * 1_000_003 + self.row) * 1_000_003 + step_id) * 7 + purpose
        if self.request_index:  # hashed: no sum may meet the keys of another seed, row or round
            hashed = blake2b(f"{self.request_index} {key}".encode(), digest_size=8)
            key = int.from_bytes(hashed.digest())
        return torch.Generator().manual_seed(key % (1 << 63))


def widened(logits: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
    """Return a copy in float32 or better, which processors may change."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)


class ProcessedDistribution:
    """The target's law after each visited node, under processors that see that node's own path.

    Args:
        logits: raw target logits after the root (row 0) and after node n (row n + 1).
        emitted: all tokens up to and including the root; more may be appended later.
        tree: the candidates.
        sampling: the processors; greedy decoding makes each law a point mass.
    """

    def __init__(
        self,
        logits: Float[Tensor, "queries vocab"],
        emitted: list[int],
        tree: TreeRow,
        sampling: Sampling,
    ) -> None:
        self.logits = logits
        self.emitted = emitted
        self.length = len(emitted)
        self.tree = tree
        self.sampling = sampling

    def __call__(self, node: int) -> Float[Tensor, " vocab"]:
        """Return the law of the token that follows `node` (or ROOT), in float32 or better.

        Raises:
            NumericalError: the target's logits or their processors leave no law.
        """
        probs = self.sampling.probs(self.scores(node)[None])[0]
        check_finite(probs, self.raw(node), position=self.position(node))
        return probs

    def best(self, node: int) -> int:
        """Return the likeliest token after `node` (or ROOT)."""
        scores, token = self.scores(node).max(dim=-1)
        check_finite(scores, self.raw(node), position=self.position(node))
        return int(token)

    def position(self, node: int) -> int:
        """Return the position of the token that follows `node` (or ROOT)."""
        return self.length + len(self.tree.path(node))

    def raw(self, node: int) -> Float[Tensor, " vocab"]:
        """Return the target's own logits after `node` (or ROOT)."""
        return self.logits[node + 1]

    def scores(self, node: int) -> Float[Tensor, " vocab"]:
        """Return the processed logits after `node` (or ROOT)."""
        raw = widened(self.raw(node)[None])
        scores: Tensor = self.sampling.processors(self._prefix(node), raw)  # type: ignore[arg-type]
        return scores[0]

    def _prefix(self, node: int) -> Int[Tensor, "1 tokens"]:
        if self.sampling.is_prefix_free:
            return torch.empty(1, 0, dtype=torch.long, device=self.logits.device)
        drafted = [self.tree.token_ids[index] for index in self.tree.path(node)]
        return torch.tensor([[*self.emitted[: self.length], *drafted]], device=self.logits.device)


def check_finite(values: Tensor, logits: Float[Tensor, " vocab"], position: int) -> None:
    """Refuse what is not a law, and say whether the target or the processors are at fault.

    Args:
        law: probabilities or scores that must be finite where it matters.
        logits: the target's own, that the law came from.
        position: of the token that the law is for.

    Raises:
        NumericalError: the law's largest entry is not a finite number.
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
        remedy="loosen the processors or constraints",
    )
