"""The loss is additive, local to documents, and independent of how it is computed."""

import math

import pytest
import torch
from helpers.models import tiny_settings
from helpers.training import TinyTraining, cropped, random_batch, tiny_training

from jakiro.experts import ExpertsOutput
from training.loop.trainer import count_positions
from training.loss.batch import Batch
from training.loss.heads import Heads
from training.loss.objectives import Goals, LossTerms, drafter_loss
from training.loss.settings import ObjectiveSettings
from training.module import Meter
from training.processes import Processes


@pytest.fixture(scope="module")
def tiny() -> TinyTraining:
    return tiny_training()


BATCH = random_batch([10, 11], [5, 19], [24], samples=2)


def part(batch: Batch, begin: int, end: int) -> Batch:
    return Batch(*(column[begin:end] for column in vars(batch).values()))


def changed(batch: Batch, **columns: torch.Tensor) -> Batch:
    return Batch(**(vars(batch) | columns))


def assert_close(one: LossTerms, other: LossTerms) -> None:
    for name, a, b in zip(LossTerms._fields, one, other, strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-5, atol=1e-5, msg=lambda text, n=name: f"{n} {text}"
        )


def test_losses_of_sequences_add_up_to_the_loss_of_the_batch(tiny: TinyTraining) -> None:
    parts = [tiny.loss(part(BATCH, 0, 1)), tiny.loss(part(BATCH, 1, 3))]
    summed = LossTerms(*(sum(column) for column in zip(*parts, strict=True)))
    assert_close(tiny.loss(BATCH), summed)


def test_positions_are_counted_as_the_loss_counts_them(tiny: TinyTraining) -> None:
    partly = changed(BATCH, is_response=BATCH.is_response & (torch.arange(24) % 3 > 0))
    for batch in (BATCH, partly):
        assert count_positions(batch) == tiny.loss(batch).num_positions.item() > 0


def test_padding_does_not_change_the_loss(tiny: TinyTraining) -> None:
    batch = random_batch([9, 8], [17], sequence_length=24)
    other = torch.where(batch.documents < 0, 5, batch.token_ids)
    assert_close(tiny.loss(batch), tiny.loss(changed(batch, token_ids=other)))
    shorter = cropped(batch, 0, 17)
    assert_close(tiny.loss(batch), tiny.loss(shorter))


def test_prompts_carry_no_loss_and_do_not_count(tiny: TinyTraining) -> None:
    is_response = BATCH.is_response & (BATCH.positions >= 4)
    terms = tiny.loss(changed(BATCH, is_response=is_response))
    # Position i predicts token i + 1, so the first three positions of a document have no loss.
    expected = 2 * sum(length - 4 for length in (10, 11, 5, 19, 24))
    assert terms.num_positions.item() == expected
    assert terms.level_count[1].item() == expected - 2 * 5


@pytest.mark.parametrize("chunk_size", [1, 7, 50])
def test_the_size_of_chunks_changes_neither_loss_nor_gradients(
    tiny: TinyTraining, chunk_size: int
) -> None:
    whole, chunked = tiny.loss(BATCH), tiny.loss(BATCH, chunk_size=chunk_size)
    assert_close(whole, chunked)
    for one, other in zip(tiny.gradients(whole.total), tiny.gradients(chunked.total), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("parallel_levels", [0, 1, 2])
def test_one_expert_has_the_same_loss_in_both_modes(parallel_levels: int) -> None:
    mixture, summed = (
        tiny_training(tiny_settings(1, combine, parallel_levels)) for combine in ("mixture", "sum")
    )
    summed.drafter.load_state_dict(mixture.drafter.state_dict())
    assert_close(mixture.loss(BATCH), summed.loss(BATCH))


def test_a_drafter_that_returns_the_targets_features_agrees_with_it_everywhere(
    tiny: TinyTraining,
) -> None:
    from jakiro.experts import ExpertsOutput
    from training.loss.objectives import Goals, drafter_loss

    view = tiny.view(BATCH)
    ahead = torch.stack([view.features, view.features.roll(-1, dims=1)], dim=2)
    shape = (*BATCH.token_ids.shape, 1)
    perfect = ExpertsOutput(ahead.unsqueeze(3), torch.zeros(shape), torch.ones(shape))
    heads = tiny.reader(BATCH.token_ids.shape[1]).heads
    terms, _ = drafter_loss(perfect, Goals(view.features), BATCH, 0, heads, tiny.objective)
    assert torch.equal(terms.correct, terms.level_count)
    assert terms.feature.tolist() == [0.0, 0.0]
    log_probs = tiny.target.logits(view.features).log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    weight = tiny.objective.distance_decay ** (torch.arange(24) - BATCH.anchors[:, 0] - 1)
    inner = BATCH.targets_exist(1) & (torch.arange(24) > BATCH.anchors[:, 0])
    torch.testing.assert_close(terms.token[0], (entropy * weight)[inner].sum())


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_means_of_the_terms_are_weighted_by_the_decay(decay: float) -> None:
    shape, table = BATCH.token_ids.shape, torch.randn(61, 4)
    heads = Heads(lambda features: features @ table.T, lambda features: features @ table.T)
    uniform = ExpertsOutput(
        torch.zeros(*shape, 1, 1, 4), torch.zeros(*shape, 1), torch.ones(*shape, 1)
    )
    goals = Goals(torch.randn(*shape, 4))
    settings = ObjectiveSettings(distance_decay=decay)
    terms, _ = drafter_loss(uniform, goals, BATCH, 0, heads, settings)
    assert (terms.level_weight < terms.level_count).item() == (decay < 1)
    meter = Meter(Processes(0, 1, torch.device("cpu")), num_levels=1, num_experts=1, num_depths=1)
    meter.add(terms, 24)
    means = meter.read()
    assert means["levels"][0]["token"] == pytest.approx(math.log(61), rel=1e-5)
    assert means["router_imbalance"] == pytest.approx(1, rel=1e-5)
