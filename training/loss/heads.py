"""The heads of target and drafter, and the target's distributions over the draft vocabulary."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from jakiro.draft_head import DraftHead
from training.loss.batch import Normalizers, indices_of

Logits = Callable[[Tensor], Tensor]

# Smallest log-probability. It is finite, so that its product with a probability of 0 is 0 even
# where a head's logits are -inf.
LOWEST = torch.finfo(torch.float32).min


class Heads(NamedTuple):
    """The heads of target and drafter, which map features to logits.

    Attributes:
        token_ids: ids of the draft vocabulary, in ascending order; None for the whole vocabulary.
        target_drafted: the target's head over the draft vocabulary, which reads only the rows of
            these tokens; None if there is no draft vocabulary, or if the head has no such rows. If
            the drafter has a head or an output norm of its own, it keeps a copy of the rows.
        temperature: temperature, at least 0, of the distributions that the token loss compares.
    """

    target: Logits
    draft: Logits
    token_ids: Int[Tensor, " drafted"] | None = None
    parameters: tuple[Tensor, ...] = ()
    target_drafted: Logits | None = None
    num_tokens: int = 0
    temperature: float = 1.0

    @classmethod
    def of(cls, head: DraftHead) -> "Heads":
        whole, of_target = DraftHead(head.target, None).logits, head.target.head
        drafted = _drafted_by_target(head)
        num_tokens = of_target.out_features if type(of_target) is nn.Linear else 0
        return cls(whole, head.logits, head.token_ids, head.parameters, drafted, num_tokens)

    def at(self, temperature: float) -> "Heads":
        return self._replace(temperature=temperature)

    @property
    def keeps_logits(self) -> bool:
        """Whether logits are not divided by the temperature, which is 1 or 0 (greedy decoding).

        The target's normalizers on disk, which belong to temperature 1, are used at no other one.
        """
        return self.temperature in (0, 1)

    def saves_time(self, num_uses: int) -> bool:
        """Return whether the target's normalizers should be computed once and kept.

        This takes one product with all rows of the target's head, and one with the rows of the
        draft vocabulary for each use, instead of one with all rows for each use.
        """
        if self.target_drafted is None or self.token_ids is None:
            return False
        return self.num_tokens + num_uses * len(self.token_ids) < num_uses * self.num_tokens

    def target_logits(self, features: Float[Tensor, "n hidden"]) -> Float[Tensor, "n vocab"]:
        """Return the target's logits divided by the temperature; at 0, they are not divided."""
        return self._divide(self.target(features).float())

    def log_probs_of_target(
        self, features: Float[Tensor, "n hidden"], known: Normalizers | None
    ) -> tuple[Float[Tensor, "n drafted"], Int[Tensor, " n"]]:
        """Return the target's log-probabilities of the draft vocabulary, and its most likely token.

        At temperature 0, the most likely token has the probability 1, and the others have 0.

        Args:
            known: normalizers of the target's distributions at the temperature (at temperature 0,
                those of temperature 1); None to compute the logits of the whole vocabulary.
        """
        if self.temperature == 0:
            return self._certain(features, known)
        if known is not None and self.target_drafted is not None:
            logits = self._divide(self.target_drafted(features).float())
            drafted = logits - known.log_sum.unsqueeze(1)
            best = known.best
        else:
            whole = self.target_logits(features).log_softmax(dim=-1)
            drafted = whole if self.token_ids is None else whole[:, self.token_ids]
            best = whole.argmax(dim=-1)
        # With known normalizers, rounding could give a token a probability above 1.
        return drafted.clamp_(min=LOWEST, max=0), best

    def _certain(self, features: Tensor, known: Normalizers | None) -> tuple[Tensor, Tensor]:
        drafted = self.token_ids
        if known is not None and drafted is not None:
            best = known.best
        else:
            whole = self.target(features)
            best = whole.argmax(dim=-1)
            if drafted is None:
                drafted = torch.arange(whole.shape[1], device=whole.device)
        return torch.where(drafted == best.unsqueeze(1), 0.0, LOWEST), best

    def process_draft(self, log_probs: Float[Tensor, "n drafted"]) -> Float[Tensor, "n drafted"]:
        """Return draft distributions at the temperature; at temperature 0, they are unchanged.

        Decoding uses the same distributions, except that it processes only those tokens that may be
        candidates. In greedy decoding, draft distributions only rank candidates.
        """
        if self.keeps_logits:
            return log_probs
        return self._divide(log_probs).log_softmax(dim=-1).clamp(min=LOWEST)

    def _divide(self, values: Tensor) -> Tensor:
        return values if self.keeps_logits else values / self.temperature


def _drafted_by_target(head: DraftHead) -> Logits | None:
    if head.token_ids is None or type(head.target.head) is not nn.Linear:
        return None
    if head.own is None and head.norm is None:
        return head.logits
    return DraftHead(head.target, head.token_ids).logits


@torch.no_grad()
def normalizers_of(
    features: Float[Tensor, "batch length hidden"],
    needed: Bool[Tensor, "batch length"],
    logits: Logits,
    chunk_size: int,
) -> Normalizers:
    """Return the normalizers of the target's distributions; zeros where they are not needed."""
    result = Normalizers(
        torch.zeros(needed.numel(), device=features.device),
        torch.zeros(needed.numel(), dtype=torch.long, device=features.device),
    )
    flat = features.flatten(0, 1)
    for chunk in indices_of(needed).split(chunk_size):
        whole = logits(flat[chunk]).float()
        result.log_sum[chunk] = whole.logsumexp(dim=-1)
        result.best[chunk] = whole.argmax(dim=-1)
    return Normalizers(*(part.view_as(needed) for part in result))
