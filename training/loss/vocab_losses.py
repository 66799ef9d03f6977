"""Losses between the vocabulary distributions of target and drafter, computed in chunks."""

from functools import reduce
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from jakiro.experts import joint_log_probs, posterior_log_weights
from training.loss.batch import Examples, Normalizers
from training.loss.heads import LOWEST, Heads
from training.loss.settings import LevelWeights, TokenLoss


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
    - "ce_tv": 0.1 "cross_entropy" + 0.9 "total_variation", as in DSpark (arXiv 2607.05147)
    - "lk_hybrid" (arXiv 2602.23881): l "kl" + (1 - l) (1 - a), where a is the probability that a
      draft token is accepted (`accept_probs`), and l = exp(-3 a) has no gradient

    With a draft vocabulary, the sums run over the tokens of that vocabulary. The probability that p
    gives to all other tokens affects "total_variation" and a, as a probability of rejection. If p
    gives the draft vocabulary the probability m, "kl" is at least m log m, and "reverse_kl" is at
    least -log m.

    Args:
        target: log-probabilities log p of the draft vocabulary, on which p may sum to less than 1.
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
        case "ce_tv":
            likelihood = token_losses("cross_entropy", target, draft)
            return 0.1 * likelihood + 0.9 * token_losses("total_variation", target, draft)
        case "lk_hybrid":
            accept = accept_probs(target, draft)
            share = torch.exp(-3 * accept.detach())
            return share * token_losses("kl", target, draft) + (1 - share) * (1 - accept)


def accept_probs(
    target: Float[Tensor, "n vocab"], draft: Float[Tensor, "n vocab"]
) -> Float[Tensor, " n"]:
    """Return `sum min(p, q)`: the probability that a token sampled from q is accepted.

    Args:
        target: log-probabilities log p of the draft vocabulary; other tokens are rejected.
    """
    return torch.minimum(target, draft).exp().sum(dim=-1)


def dpace_weights(
    text_probs: Float[Tensor, "n levels"], exists: Bool[Tensor, "n levels"]
) -> Float[Tensor, "n levels"]:
    """Return D-PACE's weight (arXiv 2605.18810) of each level, without a gradient.

    With s = (1 + q) / 2 for the draft probability q of the text's token, the weight of level k is
    the sum of s_0 ... s_j over the levels j >= k. A level that does not exist ends the path: it and
    those behind it have the weight 0.
    """
    reached = torch.where(exists, (1 + text_probs.detach()) / 2, 0.0).cumprod(dim=1)
    return reached.flip(1).cumsum(dim=1).flip(1)


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
    """
    absent = log_weights.isneginf()
    log_probs = torch.where(absent, float("-inf"), joint_at_token - log_weights)
    best, chosen = log_probs.max(dim=-1)
    weight = log_weights.gather(-1, chosen.unsqueeze(-1)).squeeze(-1).exp().detach()
    return torch.where(best.isneginf(), 0.0, -weight * best)


class TermWeights(NamedTuple):
    """Weights of the two losses of tokens in their sum, and how this is weighted by level."""

    token: float = 1.0
    choice: float = 0.0
    by_level: LevelWeights = "decay"


class TokenResults(NamedTuple):
    """Results at each position and level, from the distributions of target and drafter.

    Attributes:
        weights: mixture weights of the components: the prior at level 0, then the posterior.
        accept: probability, at temperature 1, that a token sampled from the draft is accepted; 0 in
            training, where it is not computed.
        text_prob: draft probability of the text's next token at temperature 1.
    """

    token_loss: Float[Tensor, "n levels"]
    choice_loss: Float[Tensor, "n levels"]
    target_best: Int[Tensor, "n levels"]
    correct: Bool[Tensor, "n levels"]
    weights: Float[Tensor, "n levels components"]
    accept: Float[Tensor, "n levels"]
    text_prob: Float[Tensor, "n levels"]


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
        importance: weight of each loss in the sum; a loss with weight 0 is ignored. With `dpace`,
            the weights by level are multiplied by it, and a level with weight 0 does not exist.
    """
    features, log_weights = examples.features, examples.log_weights
    kept = examples.normalizers or ()
    parts = (features, log_weights, examples.targets, examples.next_tokens, importance, *kept)
    chunks = zip(*(part.detach().split(chunk_size) for part in parts), strict=True)
    learns = torch.is_grad_enabled() and features.requires_grad
    totals, results, slopes = [], [], []
    of_head: list[Tensor] = []
    for chunk in chunks:
        chunk_total, chunk_results, gradients = _chunk(heads, kind, weights, learns, *chunk)
        totals.append(chunk_total)
        results.append(chunk_results)
        slopes.append(gradients[:2])
        if not of_head:  # in float32, because half precision would lose small late gradients
            of_head = [gradient.float() for gradient in gradients[2:]]
            continue
        for sum_so_far, gradient in zip(of_head, gradients[2:], strict=True):
            sum_so_far += gradient
    total = torch.stack(totals).sum()
    if learns:
        saved = [torch.cat(column) for column in zip(*slopes, strict=True)] + of_head
        total = _WithGradients.apply(total, *saved, features, log_weights, *heads.parameters)
    return total, TokenResults(*(torch.cat(column) for column in zip(*results, strict=True)))


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
    """Computes `joint.logsumexp(dim=1)`, clamped to at least `LOWEST`.

    This is several times faster than `logsumexp` for few components and a large vocabulary.
    """

    @staticmethod
    def forward(ctx: Any, joint: Tensor) -> Tensor:
        blended = reduce(torch.logaddexp, joint.unbind(dim=1)).clamp(min=LOWEST)
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
    of_target = Normalizers(*normalizers) if normalizers else None
    results = _token_results(
        heads, kind, *inputs, targets, next_tokens, weights.choice > 0, of_target
    )
    loss = weights.token * results.token_loss + weights.choice * results.choice_loss
    if weights.by_level == "dpace":
        importance = importance * dpace_weights(results.text_prob, importance > 0)
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
    normalizers: Normalizers | None,
) -> TokenResults:
    weights = log_weights.float()
    levels: list[tuple[Tensor, ...]] = []
    for level in range(features.shape[1]):
        with torch.no_grad():
            of_level = None if normalizers is None else normalizers.level(level)
            target_probs, best = heads.log_probs_of_target(targets[:, level], of_level)
        joint = joint_log_probs(heads.draft(features[:, level]), weights)
        blended = _Blended.apply(joint)
        guess, drafted = blended.argmax(dim=-1), heads.token_ids
        if drafted is not None:
            guess = drafted[guess]
        loss = token_losses(kind, target_probs, heads.process_draft(blended))
        choice, used = torch.zeros_like(loss), weights
        of_text = at_token(joint, next_tokens[:, level], drafted)
        accept, text_prob = torch.zeros_like(loss), of_text.detach().exp().sum(dim=1)
        if not torch.is_grad_enabled():  # training would take some percent more time
            if heads.temperature != 1:
                # Normalizers at temperature 0 are those of temperature 1; others do not apply.
                of_level = of_level if heads.keeps_logits else None
                target_probs, _ = heads.at(1).log_probs_of_target(targets[:, level], of_level)
            accept = accept_probs(target_probs, blended)
        if has_choice:
            choice = choice_losses(of_text, weights)
        if level + 1 < features.shape[1]:
            weights = posterior_log_weights(of_text, weights)
        levels.append((loss, choice, best, best == guess, used.exp(), accept, text_prob))
    return TokenResults(*(torch.stack(column, dim=1) for column in zip(*levels, strict=True)))


def at_token(
    joint: Float[Tensor, "n components drafted"],
    tokens: Int[Tensor, " n"],
    drafted: Int[Tensor, " drafted"] | None,
) -> Float[Tensor, "n components"]:
    """Return `log(w_e p_e(t))` of each component e at one token t per position.

    The result is -inf if t is not in `drafted`.
    """
    indices = tokens
    if drafted is not None:
        indices = torch.searchsorted(drafted, tokens.contiguous()).clamp(max=len(drafted) - 1)
    at_index = joint.gather(2, indices[:, None, None].expand(-1, joint.shape[1], 1)).squeeze(2)
    if drafted is None:
        return at_index
    return torch.where((drafted[indices] == tokens)[:, None], at_index, float("-inf"))
