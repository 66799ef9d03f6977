"""What a drafter is trained for: the target's laws, its features, and telling features apart."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor
from torch.nn.functional import smooth_l1_loss
from torch.utils.checkpoint import checkpoint

from jakiro.draft_head import DraftHead
from jakiro.experts import BankOutput
from jakiro.mixture import joint_log_probs, posterior_log_weights
from jakiro.settings import Settings
from training.batch import Batch
from training.contrast import contrastive_loss
from training.examples import Examples, gather_examples
from training.token_losses import TokenLoss, token_losses

Logits = Callable[[Tensor], Tensor]


class Heads(NamedTuple):
    """Features to logits: of the target over all tokens, of the drafter over those it drafts."""

    target: Logits
    draft: Logits
    token_ids: Int[Tensor, " drafted"] | None = None  # ascending; None: all

    @classmethod
    def of(cls, head: DraftHead) -> "Heads":
        """Return both heads of a target."""
        whole = DraftHead(head.target, None)
        return cls(whole.logits, head.logits, head.token_ids)


class Goals(NamedTuple):
    """What the drafter shall predict at every position.

    With target layer inference the features come out of the target's last layers, and the state at
    the input of these is regressed instead of them.
    """

    features: Float[Tensor, "batch rows hidden"]
    state: Float[Tensor, "batch rows hidden"] | None = None
    predicted: Float[Tensor, "batch rows hidden"] | None = None  # of the drafter, for `state`


class ObjectiveSettings(Settings):
    """Weights of the loss terms (arXiv 2502.06282; the contrast is an InfoNCE of this project)."""

    token_weight: float = Field(0.1, ge=0)
    token_loss: TokenLoss = "cross_entropy"
    feature_weight: float = Field(1.0, ge=0)
    contrast_weight: float = Field(0.1, ge=0)
    balance_weight: float = Field(0.01, ge=0)
    parallel_weight: float = Field(0.5, ge=0)  # of every level after the first
    distance_decay: float = Field(1.0, gt=0, le=1)  # gamma^(d - 1)
    contrast_temperature: float = Field(0.1, gt=0)
    chunk_rows: int = Field(2048, ge=1)  # positions whose vocabulary-wide laws exist at once


class LossTerms(NamedTuple):
    """Sums over positions, to be divided by counts once those of all processes are known."""

    total: Float[Tensor, ""]
    token: Float[Tensor, " levels"]
    feature: Float[Tensor, " levels"]
    contrast: Float[Tensor, " levels"]
    balance: Float[Tensor, ""]
    correct: Float[Tensor, " levels"]  # positions where drafter and target agree on the best token
    level_count: Float[Tensor, " levels"]
    num_positions: Float[Tensor, ""]  # positions that carry a loss


class Laws(NamedTuple):
    """Per-position results of one pass over the vocabulary."""

    token_loss: Float[Tensor, "n levels"]
    target_best: Int[Tensor, "n levels"]
    correct: Bool[Tensor, "n levels"]
    weights: Float[Tensor, "n levels components"]  # prior at level 0, posterior afterwards


def drafter_loss(
    output: BankOutput,
    goals: Goals,
    batch: Batch,
    draw: int,
    heads: Heads,
    settings: ObjectiveSettings,
) -> LossTerms:
    """Return the loss of one draw of anchors, as sums over positions.

    Args:
        output: of the drafter at every position.
        goals: of the frozen target, at every position.
        batch: the packed rows.
        draw: which of the batch's anchors the output was made with.
        heads: of target and drafter.
        settings: weights of the terms.
    """
    examples = gather_examples(output, goals.features, batch, draw, settings.distance_decay)
    laws = _laws_in_chunks(examples, heads, settings)
    features = examples.features.float()
    blended = einsum(laws.weights.detach(), features, "n l c, n l c h -> n l h")
    targets = examples.targets.float()
    contrast = [
        contrastive_loss(
            blended[:, level],
            targets[:, level],
            laws.target_best[:, level],
            examples.valid[:, level],
            examples.row_sizes,
            settings.contrast_temperature,
        )
        for level in range(targets.shape[1])
    ]
    regressed, regressand = blended, targets
    if goals.state is not None and goals.predicted is not None:
        pair = (goals.predicted, goals.state)
        regressed, regressand = (
            part.flatten(0, 1)[examples.places].float().unsqueeze(1) for part in pair
        )
    feature = smooth_l1_loss(regressed, regressand, reduction="none").mean(dim=-1)
    return _weighted(examples, laws, feature, torch.stack(contrast, dim=1), settings)


def _laws_in_chunks(examples: Examples, heads: Heads, settings: ObjectiveSettings) -> Laws:
    """Run the vocabulary in chunks of positions; backward recomputes each chunk's laws."""
    parts = (examples.features, examples.log_weights, examples.targets, examples.next_tokens)
    chunks = list(zip(*(part.split(settings.chunk_rows) for part in parts), strict=True))
    if len(chunks) == 1:  # one chunk may exist at any time, so there is nothing to save
        return _laws(heads, settings.token_loss, *chunks[0])
    laws = [
        checkpoint(_laws, heads, settings.token_loss, *chunk, use_reentrant=False)
        for chunk in chunks
    ]
    return Laws(*(torch.cat(column) for column in zip(*laws, strict=True)))


def _laws(
    heads: Heads,
    kind: TokenLoss,
    features: Tensor,
    log_weights: Tensor,
    targets: Tensor,
    next_tokens: Tensor,
) -> Laws:
    weights = log_weights.float()
    levels: list[tuple[Tensor, ...]] = []
    for level in range(features.shape[1]):
        with torch.no_grad():
            target_law = heads.target(targets[:, level]).float().log_softmax(dim=-1)
            best = target_law.argmax(dim=-1)
        joint = joint_log_probs(heads.draft(features[:, level]), weights)
        law = joint.logsumexp(dim=1)
        guess, drafted = law.argmax(dim=-1), heads.token_ids
        if drafted is not None:
            target_law, guess = target_law[:, drafted], drafted[guess]
        loss = token_losses(kind, target_law, law)
        levels.append((loss, best, best == guess, weights.exp()))
        at_token = _at_token(joint, next_tokens[:, level], drafted)
        weights = posterior_log_weights(at_token, weights)
    return Laws(*(torch.stack(column, dim=1) for column in zip(*levels, strict=True)))


def _at_token(joint: Tensor, tokens: Tensor, drafted: Tensor | None) -> Tensor:
    """Return `log(w_e p_e(t))` of one token per position; -inf for one that is never drafted."""
    places = tokens
    if drafted is not None:
        places = torch.searchsorted(drafted, tokens.contiguous()).clamp(max=len(drafted) - 1)
    found = joint.gather(2, places[:, None, None].expand(-1, joint.shape[1], 1)).squeeze(2)
    if drafted is None:
        return found
    return torch.where((drafted[places] == tokens)[:, None], found, float("-inf"))


def _weighted(
    examples: Examples,
    laws: Laws,
    feature: Tensor,
    contrast: Tensor,
    settings: ObjectiveSettings,
) -> LossTerms:
    def total_of(term: Tensor) -> Tensor:
        return torch.where(examples.valid, term * examples.weight[:, None], 0.0).sum(dim=0)

    token, features, contrasts = map(total_of, (laws.token_loss, feature, contrast))
    balance = _imbalance(examples)
    per_level = (
        settings.token_weight * token
        + settings.feature_weight * features
        + settings.contrast_weight * contrasts
    )
    later = settings.parallel_weight * per_level[1:].sum()
    return LossTerms(
        total=per_level[0] + later + settings.balance_weight * balance,
        token=token.detach(),
        feature=features.detach(),
        contrast=contrasts.detach(),
        balance=balance.detach(),
        correct=(laws.correct & examples.valid).sum(dim=0).float(),
        level_count=examples.valid.sum(dim=0).float(),
        num_positions=examples.valid[:, 0].sum().float(),
    )


def _imbalance(examples: Examples) -> Tensor:
    """Return E * sum_e load_e^2 of each packed row, 1 when experts share its load evenly, weighted.

    Taken per row, the sum does not depend on which rows share a micro-batch.
    """
    total = examples.weight.new_zeros(())
    gates, weights = (part.split(examples.row_sizes) for part in (examples.gate, examples.weight))
    for gate, weight in zip(gates, weights, strict=True):
        if len(weight):
            load = gate.float().mean(dim=0)
            total = total + load.square().sum() * gate.shape[-1] * weight.sum()
    return total
