"""The training objective: a weighted sum of token, feature, contrastive and balance losses."""

from typing import NamedTuple

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import normalize, smooth_l1_loss

from jakiro.experts import ExpertsOutput
from training.loss.batch import Batch, Examples, Normalizers, TargetView, gather_examples
from training.loss.heads import Heads, normalizers_of
from training.loss.settings import ObjectiveSettings
from training.loss.vocab_losses import TermWeights, TokenResults, compare_distributions


def contrastive_loss(
    predicted: Float[Tensor, "n hidden"],
    goal: Float[Tensor, "n hidden"],
    target_best: Int[Tensor, " n"],
    valid: Bool[Tensor, " n"],
    sequence_sizes: tuple[int, ...],
    temperature: float,
) -> Float[Tensor, " n"]:
    """Return the InfoNCE loss (arXiv 1807.03748) of each position, computed on unit vectors.

    The positive is the target feature of the same position. The negatives are the target features
    of other valid positions in the same packed sequence, except for positions at which the target's
    most likely token is the same.
    """
    pieces = [part.split(sequence_sizes) for part in (predicted, goal, target_best, valid)]
    sequences = zip(*pieces, strict=True)
    return torch.cat([_sequence_loss(p, g, b, v, temperature) for p, g, b, v in sequences])


def _sequence_loss(
    predicted: Tensor, goal: Tensor, target_best: Tensor, valid: Tensor, temperature: float
) -> Tensor:
    similarity = normalize(predicted, dim=-1) @ normalize(goal, dim=-1).mT / temperature
    is_positive = torch.eye(len(goal), dtype=torch.bool, device=goal.device)
    excluded = ((target_best[:, None] == target_best) | ~valid) & ~is_positive
    return -similarity.masked_fill(excluded, float("-inf")).log_softmax(dim=-1).diagonal()


class Goals(NamedTuple):
    """The values that the drafter learns to predict at every position, from the target.

    With tail layers (target layer inference), the target's last layers compute the drafter's
    features from states that the drafter predicts. The regression loss then compares the predicted
    states, instead of the features, with those of the target, unless parallel levels are projected
    from the features (`schedule.parallel_heads` of `transfer`).
    """

    features: Float[Tensor, "batch length hidden"]
    state: Float[Tensor, "batch length hidden"] | None = None
    predicted: Float[Tensor, "batch length hidden"] | None = None
    normalizers: Normalizers | None = None


def shared_normalizers(
    view: TargetView,
    batch: Batch,
    heads: Heads,
    num_levels: int,
    chunk_size: int,
) -> Normalizers | None:
    """Return normalizers that all anchor samples and levels share; None if this saves no time.

    If the view contains normalizers, these are returned, unless the heads need those at another
    temperature.

    The positions whose distribution a later level learns are among those whose distribution level 0
    learns, so only these need normalizers.
    """
    if view.normalizers is not None and heads.keeps_logits:
        return view.normalizers
    if not heads.saves_time(num_uses=batch.anchors.shape[1] * num_levels):
        return None
    return normalizers_of(view.features, batch.targets_exist(1), heads.target_logits, chunk_size)


class LossTerms(NamedTuple):
    """Terms of the loss as sums over positions.

    The sums still have to be divided by the number of positions in all processes.
    """

    total: Float[Tensor, ""]
    token: Float[Tensor, " levels"]
    multiple_choice: Float[Tensor, " levels"]
    feature: Float[Tensor, " levels"]
    contrast: Float[Tensor, " levels"]
    balance: Float[Tensor, ""]
    router_entropy: Float[Tensor, ""]  # entropy of the router's weights, in nats
    expert_load: Float[Tensor, " experts"]  # sum of the experts' shares in the work
    # Number of positions at which drafter and target have the same most likely token.
    correct: Float[Tensor, " levels"]
    level_count: Float[Tensor, " levels"]  # number of positions that carry a loss at each level
    level_weight: Float[Tensor, " levels"]  # sum of the weights of these positions
    num_positions: Float[Tensor, ""]  # number of positions that carry a loss
    accepted_length: Float[Tensor, ""]  # sum of the expected accepted lengths of trees
    num_trees: Float[Tensor, ""]  # number of these trees; 0 if the lengths are not computed
    # Along the draft paths (`training.loss.accepted_length`):
    accept: Float[Tensor, " depths"]  # sum of the probabilities that a draft is accepted
    depth_count: Float[Tensor, " depths"]  # number of paths that are at least this long
    path_tokens: Float[Tensor, ""]  # sum of the tokens of a step on the paths of full length


def drafter_loss(
    output: ExpertsOutput,
    goals: Goals,
    batch: Batch,
    sample: int,
    heads: Heads,
    settings: ObjectiveSettings,
) -> tuple[LossTerms, Float[Tensor, "batch length levels"]]:
    """Return the loss of one anchor sample (an anchor for every position), as sums over positions.

    The second result is the probability that a draft is accepted, at each position and level. The
    sums along draft paths, which may cross samples, are left to `with_accept_rates`.
    """
    examples = gather_examples(
        output, goals.features, batch, sample, settings.distance_decay, goals.normalizers
    )
    importance = torch.where(examples.valid, examples.weight[:, None], 0.0)
    if settings.level_weights == "decay":
        importance = importance * _level_weights(examples, settings)
    has_choice = settings.multiple_choice_weight > 0
    scale = TermWeights()
    if has_choice:
        scale = TermWeights(settings.token_weight, settings.multiple_choice_weight)
    token, results = compare_distributions(
        examples,
        importance,
        heads,
        settings.token_loss,
        settings.chunk_size,
        scale._replace(by_level=settings.level_weights),
    )
    token = token if has_choice else settings.token_weight * token
    features = examples.features.float()
    blended = einsum(results.weights, features, "n l c, n l c h -> n l h")
    targets = examples.targets.float()
    contrast = [
        contrastive_loss(
            blended[:, level],
            targets[:, level],
            results.target_best[:, level],
            examples.valid[:, level],
            examples.sequence_sizes,
            settings.contrast_temperature,
        )
        for level in range(targets.shape[1])
    ]
    regressed, regressand = blended, targets
    if goals.state is not None and goals.predicted is not None:
        pair = (goals.predicted, goals.state)
        regressed, regressand = (
            part.flatten(0, 1)[examples.indices].float().unsqueeze(1) for part in pair
        )
    feature = smooth_l1_loss(regressed, regressand, reduction="none").mean(dim=-1)
    terms = _weigh(examples, results, token, feature, torch.stack(contrast, dim=1), settings)
    return terms, on_batch(results.accept, examples, batch)


def on_batch(
    values: Float[Tensor, "n levels"], examples: Examples, batch: Batch
) -> Float[Tensor, "batch length levels"]:
    """Return values of the gathered positions in the shape of the batch, with 0 at the others."""
    shape = batch.token_ids.shape
    whole = values.new_zeros(shape.numel(), values.shape[1])
    return whole.index_copy(0, examples.indices, values).unflatten(0, tuple(shape))


def _level_weights(examples: Examples, settings: ObjectiveSettings) -> Float[Tensor, " levels"]:
    level = torch.arange(examples.valid.shape[1], device=examples.valid.device)
    decay = settings.level_decay ** (level - 1).clamp(min=0)
    return torch.where(level > 0, settings.parallel_weight * decay, 1.0)


def _weigh(
    examples: Examples,
    results: TokenResults,
    token: Tensor,
    feature: Tensor,
    contrast: Tensor,
    settings: ObjectiveSettings,
) -> LossTerms:
    def total_of(term: Tensor) -> Tensor:
        return torch.where(examples.valid, term * examples.weight[:, None], 0.0).sum(dim=0)

    features, contrasts, balance = total_of(feature), total_of(contrast), _imbalance(examples)
    per_level = settings.feature_weight * features + settings.contrast_weight * contrasts
    state = (per_level * _level_weights(examples, settings)).sum()
    return LossTerms(
        total=token + state + settings.balance_weight * balance,
        token=total_of(results.token_loss),
        multiple_choice=total_of(results.choice_loss),
        feature=features.detach(),
        contrast=contrasts.detach(),
        balance=balance.detach(),
        router_entropy=torch.special.entr(examples.gate.detach().float()).sum(),
        expert_load=_loads(examples).detach().sum(dim=0),
        correct=(results.correct & examples.valid).sum(dim=0).float(),
        level_count=examples.valid.sum(dim=0).float(),
        level_weight=total_of(torch.ones_like(feature.detach())),
        num_positions=examples.valid[:, 0].sum().float(),
        accepted_length=torch.zeros_like(token),
        num_trees=torch.zeros_like(token),
        accept=torch.zeros_like(token),
        depth_count=torch.zeros_like(token),
        path_tokens=torch.zeros_like(token),
    )


def _imbalance(examples: Examples) -> Tensor:
    """Return the sum of E * sum_e load_e * gate_e over packed sequences, weighted by positions.

    In a sequence, gate_e is the mean weight that the router gives to expert e of E experts. If only
    some experts run, load_e is the share of expert e in the active experts of all positions, which
    has no gradient (arXiv 2101.03961, equation 4); otherwise it equals gate_e. If the load is
    spread evenly, the term of the sequence is 1. The term is multiplied by the sum of the weights
    of the sequence's positions. Because there is one term per sequence, the result does not depend
    on how sequences are grouped into micro-batches.
    """
    total = examples.weight.new_zeros(())
    parts = (examples.gate, _loads(examples), examples.weight)
    for gate, loads, weight in zip(
        *(part.split(examples.sequence_sizes) for part in parts), strict=True
    ):
        if len(weight):
            mean = gate.float().mean(dim=0)
            product = mean.square() if examples.chosen is None else mean * loads.mean(dim=0)
            total = total + product.sum() * gate.shape[-1] * weight.sum()
    return total


def _loads(examples: Examples) -> Float[Tensor, "n experts"]:
    """Return the share of each expert in the work at each position."""
    gate, chosen = examples.gate.float(), examples.chosen
    if chosen is None:
        return gate
    return torch.zeros_like(gate).scatter_(1, chosen, 1 / chosen.shape[1])
