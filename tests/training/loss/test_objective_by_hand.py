"""All terms of the objective, and the total, are computed by hand at each position."""

import math
from typing import NamedTuple, get_args

import pytest
import torch
from helpers.models import tiny_settings
from helpers.training import TinyTraining, random_batch, tiny_training
from torch import Tensor

from jakiro.experts import ExpertsOutput
from training.loss.batch import Batch
from training.loss.heads import Heads
from training.loss.objectives import Goals, drafter_loss
from training.loss.settings import LevelWeights, ObjectiveSettings, TokenLoss

BATCH = random_batch([10, 11], [5, 19], [24])
NUM_LEVELS = 3
WEIGHTS = ObjectiveSettings(
    token_weight=0.7,
    feature_weight=0.3,
    contrast_weight=0.2,
    balance_weight=0.13,
    parallel_weight=0.45,
    level_decay=0.8,
    distance_decay=0.9,
    contrast_temperature=0.25,
)


class _Level(NamedTuple):
    """The token loss, the prediction and the goal of a level at one position."""

    token: float
    text_prob: float
    blended: Tensor
    wanted: Tensor
    best: int


@pytest.fixture(scope="module")
def tiny() -> TinyTraining:
    return tiny_training(tiny_settings(parallel_levels=2))


@pytest.fixture(scope="module")
def output() -> ExpertsOutput:
    torch.manual_seed(5)
    shape = BATCH.token_ids.shape
    gate = torch.randn(*shape, 2).softmax(-1)
    log_weights = torch.randn(*shape, 2).log_softmax(-1)
    return ExpertsOutput(torch.randn(*shape, NUM_LEVELS, 2, 32), log_weights, gate)


@pytest.mark.parametrize("level_weights", ["decay", "dpace"])
@torch.no_grad()
def test_terms_and_total_are_those_of_the_equations(
    tiny: TinyTraining, output: ExpertsOutput, level_weights: LevelWeights
) -> None:
    features = tiny.view(BATCH).features
    heads = tiny.reader(24).heads
    objective = WEIGHTS.model_copy(update={"level_weights": level_weights})
    got, _ = drafter_loss(output, Goals(features), BATCH, 0, heads, objective)
    of_levels, weighted = torch.tensor([1.0, 0.45, 0.8 * 0.45]), 0.0
    token, feature, contrast = torch.zeros(3, NUM_LEVELS).unbind()
    balance, count = 0.0, 0
    for sequence in range(3):
        levels = {
            i: _levels_at(sequence, i, output, features, heads)
            for i in range(24)
            if bool(BATCH.targets_exist(1)[sequence, i]) and int(BATCH.anchors[sequence, 0, i]) < i
        }
        decay = {i: 0.9 ** (i - int(BATCH.anchors[sequence, 0, i]) - 1) for i in levels}
        count += len(levels)
        for i, several in levels.items():
            shares = [0.5 * level.text_prob + 0.5 for level in several]
            reached = [math.prod(shares[: j + 1]) for j in range(len(shares))]
            for k, level in enumerate(several):
                by_level = sum(reached[k:]) if level_weights == "dpace" else float(of_levels[k])
                weighted += by_level * decay[i] * level.token
                token[k] += decay[i] * level.token
                feature[k] += decay[i] * _smooth_l1(level.blended, level.wanted)
                contrast[k] += decay[i] * _info_nce(i, k, levels)
        load = output.gate[sequence, list(levels)].mean(dim=0)
        balance += 2 * float(load.square().sum()) * sum(decay.values())
    torch.testing.assert_close(got.token, token, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(got.feature, feature, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(got.contrast, contrast, atol=1e-3, rtol=1e-4)
    assert got.balance.item() == pytest.approx(balance, rel=1e-4)
    assert got.num_positions.item() == count
    total = (of_levels * (0.3 * feature + 0.2 * contrast)).sum() + 0.13 * balance + 0.7 * weighted
    torch.testing.assert_close(got.total, total, atol=1e-2, rtol=1e-4)


def _levels_at(
    sequence: int, i: int, output: ExpertsOutput, features: Tensor, heads: Heads
) -> list[_Level]:
    """Return the levels of position `i` whose goals are in the same document."""
    weights = output.log_weights[sequence, i].exp()
    documents = BATCH.documents[sequence]
    found = []
    for k in range(NUM_LEVELS):
        if i + k + 1 >= 24 or documents[i + k + 1] != documents[i]:
            break
        wanted = features[sequence, i + k]
        target_probs = heads.target(wanted).softmax(-1)
        draft_probs = heads.draft(output.features[sequence, i, k]).softmax(-1)
        loss = -float((target_probs * (weights @ draft_probs).log()).sum())
        blended = weights @ output.features[sequence, i, k]
        joint = weights * draft_probs[:, BATCH.token_ids[sequence, i + k + 1]]
        best = int(target_probs.argmax())
        found.append(_Level(loss, float(joint.sum()), blended, wanted, best))
        weights = joint / joint.sum()
    return found


def _smooth_l1(got: Tensor, wanted: Tensor) -> float:
    distances = [abs(float(difference)) for difference in got - wanted]
    return sum(x * x / 2 if x < 1 else x - 0.5 for x in distances) / len(distances)


def _info_nce(i: int, k: int, levels: dict[int, list[_Level]]) -> float:
    """Return InfoNCE; negatives are goals of the sequence with a different best token."""
    own = levels[i][k]
    others = [several[k] for several in levels.values() if k < len(several)]
    goals = [own, *(other for other in others if other.best != own.best)]
    scores = [_cosine(own.blended, goal.wanted) / 0.25 for goal in goals]
    return math.log(sum(math.exp(score) for score in scores)) - scores[0]


def _cosine(one: Tensor, other: Tensor) -> float:
    return float(one @ other / (one.norm() * other.norm()))


@pytest.mark.parametrize("kind", get_args(TokenLoss))
def test_tokens_with_logits_of_minus_infinity_change_nothing(
    tiny: TinyTraining, kind: TokenLoss
) -> None:
    shape = BATCH.token_ids.shape
    features, view = torch.randn(*shape, NUM_LEVELS, 2, 32), tiny.view(BATCH)
    ids = BATCH.token_ids.clamp(max=49)
    batch = Batch(**(vars(BATCH) | {"token_ids": ids}))
    objective = WEIGHTS.model_copy(update={"token_loss": kind})

    def padded(features: Tensor) -> Tensor:
        logits = tiny.target.logits(features)
        return logits.index_fill(-1, torch.arange(50, logits.shape[-1]), float("-inf"))

    def shortened(features: Tensor) -> Tensor:
        return tiny.target.logits(features)[..., :50]

    results = []
    for head in (padded, shortened):
        learnt = features.clone().requires_grad_()
        half = torch.full((*shape, 2), 0.5)
        output = ExpertsOutput(learnt, half.log(), half)
        heads = Heads(head, head)
        terms, _ = drafter_loss(output, Goals(view.features), batch, 0, heads, objective)
        (gradient,) = torch.autograd.grad(terms.total, learnt)
        results.append((terms.total.detach(), gradient))
    assert bool(results[0][1].isfinite().all())
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
