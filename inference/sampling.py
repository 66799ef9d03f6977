"""The target's processed law at visited nodes, the draft law's shaping, and keyed uniforms."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from inference.draft_tree import TreeRow

# These look at one law alone, never at the tokens before it, so they may also shape draft laws.
WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


@dataclass(frozen=True)
class Sampling:
    """How a law becomes a token: Hugging Face processors, and whether to draw or take the best."""

    processors: LogitsProcessorList
    do_sample: bool
    seed: int = 0

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the next token is simply the largest raw logit."""
        return not self.do_sample and not self.processors

    def shape_draft(self, log_probs: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
        """Return draft laws after the same warpers that shape the target's, renormalised.

        At temperature 0 the draft law is kept as it is: it only ranks candidates there.
        """
        warpers = [one for one in self.processors if isinstance(one, WARPERS)]
        if not self.do_sample or not warpers:
            return log_probs
        no_prefix = torch.empty(len(log_probs), 0, dtype=torch.long, device=log_probs.device)
        for warper in warpers:
            log_probs = warper(no_prefix, log_probs)  # type: ignore[arg-type]
        return log_probs.log_softmax(dim=-1)

    def uniforms(self, row: int, round_id: int, count: int) -> Iterator[float]:
        """Yield numbers in [0, 1) that depend on (seed, row, round) alone."""
        generator = self.generator(row, round_id)
        yield from torch.rand(count, dtype=torch.float64, generator=generator).tolist()

    def generator(self, row: int, round_id: int, purpose: int = 0) -> torch.Generator:
        """Return a CPU generator keyed by (seed, row, round, purpose)."""
        key = ((self.seed * 1_000_003 + row) * 1_000_003 + round_id) * 7 + purpose
        return torch.Generator().manual_seed(key % (1 << 63))


class ProcessedLaw:
    """The target's law after each visited node, under processors that see that node's own path.

    Args:
        logits: raw target logits after the root (row 0) and after node n (row n + 1).
        emitted: all tokens up to and including the root.
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
        self.tree = tree
        self.sampling = sampling

    def __call__(self, node: int) -> Float[Tensor, " vocab"]:
        """Return the law of the token that follows `node` (or ROOT), in float32 or better."""
        scores = self.logits[node + 1 : node + 2]
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32), copy=True)
        processed = self.sampling.processors(self._prefix(node), scores)  # type: ignore[arg-type]
        scores = processed[0]
        if self.sampling.do_sample:
            return scores.softmax(dim=-1)
        return torch.zeros_like(scores).scatter_(0, scores.argmax(keepdim=True), 1.0)

    def _prefix(self, node: int) -> Int[Tensor, "1 tokens"]:
        drafted = [self.tree.token_ids[index] for index in self.tree.path(node)]
        return torch.tensor([[*self.emitted, *drafted]], device=self.logits.device)
