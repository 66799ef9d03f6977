"""Losses between the vocabulary distributions of target and drafter, computed in chunks."""

from functools import reduce
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from jakiro.draft_head import DraftHead
from jakiro.experts import joint_log_probs, posterior_log_weights
from training.loss.normalizers import Logits, Normalizers
from training.loss.positions import Examples
from training.loss.settings import TokenLoss


def token_losses(
    kind: TokenLoss,
    target: Float[Tensor, "n vocab"],
    draft: Float[Tensor, "n vocab"],
) -> Float[Tensor, " n"]:
    """Return the loss of each draft distribution q against the target's distribution p.

    - "cross_entropy": `-sum p log q`
    - "kl": `sum p (log p - log q)`, which has the same gradients as "cross_entropy", but is 0 when
      the distributions are equal
    - "reverse_kl": `sum q (log q - log p)`, which favors one mode of p instead of covering all
      modes
    - "total_variation": `sum |p - q| / 2`, the probability that a single draft token is rejected

    With a draft vocabulary, the sums run over the tokens of that vocabulary. The probability that p
    gives to all other tokens affects only "total_variation", as a probability of rejection. If p
    gives the draft vocabulary the probability m, "kl" is at least m log m, and "reverse_kl" is at
    least -log m.

    Args:
        kind: name of the loss.
        target: log-probabilities log p of the draft vocabulary, on which p may sum to less than 1.
        draft: log-probabilities log q of the draft vocabulary.
    """
    match kind:
        case "cross_entropy":
            return -(target.exp() * draft).sum(dim=-1)
        case "kl":
            return (target.exp() * (target - draft)).sum(dim=-1)
        case "reverse_kl":
            return (draft.exp() * (draft - target)).sum(dim=-1)
        case "total_variation":
            outside = (1 - target.exp().sum(dim=-1)).clamp(min=0)
            return ((target.exp() - draft.exp()).abs().sum(dim=-1) + outside) / 2


def choice_losses(
    joint_at_token: Float[Tensor, "n components"], log_weights: Float[Tensor, "n components"]
) -> Float[Tensor, " n"]:
    """Return the multiple-choice loss `-w_e log p_e(t)` of the best expert e for each token t.

    The best expert is the one whose distribution p_e gives t the highest probability. It alone
    receives a gradient, weighted by the router's weight w_e, which has no gradient. The source is
    multiple choice learning (arXiv 1606.07839), without the weight. The loss is 0 if no expert can
    draft t.

    Args:
        joint_at_token: `log(w_e p_e(t))` for each component e.
        log_weights: `log w_e` for each component.
    """
    absent = log_weights.isneginf()
    log_probs = torch.where(absent, float("-inf"), joint_at_token - log_weights)
    best, chosen = log_probs.max(dim=-1)
    weight = log_weights.gather(-1, chosen.unsqueeze(-1)).squeeze(-1).exp().detach()
    return torch.where(best.isneginf(), 0.0, -weight * best)


class TermWeights(NamedTuple):
    """Weights of the two losses of tokens in their sum."""

    token: float = 1.0
    choice: float = 0.0


# Smallest log-probability. It is finite, so that its product with a probability of 0 is 0 even
# where a head's logits are -inf.
_LOWEST = torch.finfo(torch.float32).min


class Heads(NamedTuple):
    """The heads of target and drafter, which map features to logits.

    Attributes:
        target: the target's head over the whole vocabulary.
        draft: the drafter's head over the draft vocabulary.
        token_ids: ids of the draft vocabulary, in ascending order; None for the whole vocabulary.
        parameters: trained parameters that `draft` computes with.
        target_drafted: the target's head over the draft vocabulary, which reads only the rows of
            these tokens; None if there is no draft vocabulary, or if the head has no such rows. If
            the drafter has a head or an output norm of its own, it keeps a copy of the rows.
        num_tokens: number of tokens of the whole vocabulary; 0 if unknown.
    """

    target: Logits
    draft: Logits
    token_ids: Int[Tensor, " drafted"] | None = None
    parameters: tuple[Tensor, ...] = ()
    target_drafted: Logits | None = None
    num_tokens: int = 0

    @classmethod
    def of(cls, head: DraftHead) -> "Heads":
        """Return the heads that belong to the drafter's head."""
        whole, of_target = DraftHead(head.target, None).logits, head.target.head
        drafted = _drafted_by_target(head)
        num_tokens = of_target.out_features if type(of_target) is nn.Linear else 0
        return cls(whole, head.logits, head.token_ids, head.parameters, drafted, num_tokens)

    def saves_time(self, num_uses: int) -> bool:
        """Return whether the target's normalizers should be computed once and kept.

        This takes one product with all rows of the target's head, and one with the rows of the
        draft vocabulary for each use, instead of one with all rows for each use.

        Args:
            num_uses: number of uses of the target's distribution at a position.
        """
        if self.target_drafted is None or self.token_ids is None:
            return False
        return self.num_tokens + num_uses * len(self.token_ids) < num_uses * self.num_tokens

    def log_probs_of_target(
        self, features: Float[Tensor, "n hidden"], known: Normalizers | None
    ) -> tuple[Float[Tensor, "n drafted"], Int[Tensor, " n"]]:
        """Return the target's log-probabilities of the draft vocabulary, and its most likely token.

        Args:
            features: the target's features.
            known: normalizers of the target's distributions; None to compute the logits of the
                whole vocabulary.
        """
        if known is not None and self.target_drafted is not None:
            log_probs = self.target_drafted(features).float() - known.log_sum.unsqueeze(1)
            return log_probs.clamp_(min=_LOWEST), known.best
        whole = self.target(features).float().log_softmax(dim=-1).clamp_(min=_LOWEST)
        drafted = whole if self.token_ids is None else whole[:, self.token_ids]
        return drafted, whole.argmax(dim=-1)


def _drafted_by_target(head: DraftHead) -> Logits | None:
    if head.token_ids is None or type(head.target.head) is not nn.Linear:
        return None
    if head.own is None and head.norm is None:
        return head.logits
    return DraftHead(head.target, head.token_ids).logits


class TokenResults(NamedTuple):
    """Results at each position and level, from the distributions of target and drafter.

    Attributes:
        token_loss: token loss, not weighted.
        choice_loss: multiple-choice loss, not weighted; 0 if its weight is 0.
        target_best: the target's most likely token.
        correct: whether the drafter's most likely token is the same as the target's.
        weights: mixture weights of the components: the prior at level 0, then the posterior.
    """

    token_loss: Float[Tensor, "n levels"]
    choice_loss: Float[Tensor, "n levels"]
    target_best: Int[Tensor, "n levels"]
    correct: Bool[Tensor, "n levels"]
    weights: Float[Tensor, "n levels components"]


def compare_distributions(
    examples: Examples,
    importance: Float[Tensor, "n levels"],
    heads: Heads,
    kind: TokenLoss,
    chunk_size: int,
    weights: TermWeights = TermWeights(),  # noqa: B008 (immutable)
) -> tuple[Float[Tensor, ""], TokenResults]:
    """Return the weighted sum of all token losses, and each position's results without gradients.

    The gradient of a chunk is computed immediately after the distributions of the chunk, so that
    the distributions of only one chunk are in memory at a time.

    Args:
        examples: positions that carry a loss.
        importance: weight of each loss in the sum; a loss with weight 0 is ignored.
        heads: heads of target and drafter.
        kind: name of the loss.
        chunk_size: number of positions in a chunk.
        weights: weights of the token loss and of the multiple-choice loss.
    """
    features, log_weights = examples.features, examples.log_weights
    kept = examples.normalizers or ()
    parts = (features, log_weights, examples.targets, examples.next_tokens, importance, *kept)
    chunks = zip(*(part.detach().split(chunk_size) for part in parts), strict=True)
    learns = torch.is_grad_enabled() and features.requires_grad
    totals, results, slopes, of_head = [], [], [], _HeadGradients(heads)
    for chunk in chunks:
        chunk_total, chunk_results, gradients = _chunk(heads, kind, weights, learns, *chunk)
        totals.append(chunk_total)
        results.append(chunk_results)
        slopes.append(gradients[:2])
        of_head.add(gradients[2:])
    total = torch.stack(totals).sum()
    if learns:
        known = [torch.cat(column) for column in zip(*slopes, strict=True)] + of_head.sums
        total = _WithGradients.apply(total, *known, features, log_weights, *heads.parameters)
    return total, TokenResults(*(torch.cat(column) for column in zip(*results, strict=True)))


class _HeadGradients:
    """Sums of the gradients of the draft head's parameters over the chunks so far."""

    def __init__(self, heads: Heads) -> None:
        self._parameters = heads.parameters
        self.sums: list[Tensor] = []

    def add(self, gradients: tuple[Tensor, ...]) -> None:
        """Add the gradients of a chunk, which are empty if nothing is learned."""
        if not self.sums:
            # In float32, because half precision would lose small gradients of late chunks.
            self.sums = [gradient.float() for gradient in gradients]
            return
        for total, gradient in zip(self.sums, gradients, strict=True):
            total += gradient


class _WithGradients(torch.autograd.Function):
    """Attaches to a sum its precomputed gradients with respect to inputs.

    The gradients come first, followed by the inputs in the same order.
    """

    @staticmethod
    def forward(ctx: Any, total: Tensor, *known_and_inputs: Tensor) -> Any:
        count = len(known_and_inputs) // 2
        known, inputs = known_and_inputs[:count], known_and_inputs[count:]
        pairs = zip(known, inputs, strict=True)
        ctx.save_for_backward(*(gradient.to(of.dtype) for gradient, of in pairs))
        return total.clone()

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> Any:
        saved = ctx.saved_tensors
        return None, *(None for _ in saved), *(known * above[0] for known in saved)


class _Blended(torch.autograd.Function):
    """Computes `joint.logsumexp(dim=1)`, clamped to at least `_LOWEST`.

    This is several times faster than `logsumexp` for few components and a large vocabulary.
    """

    @staticmethod
    def forward(ctx: Any, joint: Tensor) -> Tensor:
        blended = reduce(torch.logaddexp, joint.unbind(dim=1)).clamp(min=_LOWEST)
        ctx.save_for_backward(joint, blended)
        return blended

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> Tensor:
        joint, blended = ctx.saved_tensors
        return (joint - blended.unsqueeze(1)).exp_().mul_(above[0].unsqueeze(1))


def _chunk(
    heads: Heads,
    kind: TokenLoss,
    weights: TermWeights,
    learns: bool,
    features: Tensor,
    log_weights: Tensor,
    targets: Tensor,
    next_tokens: Tensor,
    importance: Tensor,
    *normalizers: Tensor,
) -> tuple[Tensor, TokenResults, tuple[Tensor, ...]]:
    inputs = (features.requires_grad_(learns), log_weights.requires_grad_(learns))
    known = Normalizers(*normalizers) if normalizers else None
    results = _token_results(heads, kind, *inputs, targets, next_tokens, weights.choice > 0, known)
    loss = results.token_loss
    if weights != TermWeights():
        loss = weights.token * loss + weights.choice * results.choice_loss
    total = torch.where(importance > 0, loss * importance, 0.0).sum()
    slopes = torch.autograd.grad(total, (*inputs, *heads.parameters)) if learns else ()
    return total.detach(), TokenResults(*(part.detach() for part in results)), slopes


def _token_results(
    heads: Heads,
    kind: TokenLoss,
    features: Tensor,
    log_weights: Tensor,
    targets: Tensor,
    next_tokens: Tensor,
    has_choice: bool,
    known: Normalizers | None,
) -> TokenResults:
    weights = log_weights.float()
    levels: list[tuple[Tensor, ...]] = []
    for level in range(features.shape[1]):
        with torch.no_grad():
            of_level = None if known is None else known.level(level)
            target_probs, best = heads.log_probs_of_target(targets[:, level], of_level)
        joint = joint_log_probs(heads.draft(features[:, level]), weights)
        blended = _Blended.apply(joint)
        guess, drafted = blended.argmax(dim=-1), heads.token_ids
        if drafted is not None:
            guess = drafted[guess]
        loss = token_losses(kind, target_probs, blended)
        choice, used = torch.zeros_like(loss), weights
        is_last = level + 1 == features.shape[1]
        if has_choice or not is_last:
            of_text = at_token(joint, next_tokens[:, level], drafted)
        if has_choice:
            choice = choice_losses(of_text, weights)
        if not is_last:
            weights = posterior_log_weights(of_text, weights)
        levels.append((loss, choice, best, best == guess, used.exp()))
    return TokenResults(*(torch.stack(column, dim=1) for column in zip(*levels, strict=True)))


def at_token(
    joint: Float[Tensor, "n components drafted"],
    tokens: Int[Tensor, " n"],
    drafted: Int[Tensor, " drafted"] | None,
) -> Float[Tensor, "n components"]:
    """Return `log(w_e p_e(t))` of each component e at one token t per position.

    The result is -inf if t is not in `drafted`.

    Args:
        joint: values of all tokens that may be drafted.
        tokens: one token per position.
        drafted: ids of the tokens that may be drafted, in ascending order; None for all tokens.
    """
    indices = tokens
    if drafted is not None:
        indices = torch.searchsorted(drafted, tokens.contiguous()).clamp(max=len(drafted) - 1)
    found = joint.gather(2, indices[:, None, None].expand(-1, joint.shape[1], 1)).squeeze(2)
    if drafted is None:
        return found
    return torch.where((drafted[indices] == tokens)[:, None], found, float("-inf"))
