"""Normalizers that all passes and levels share change neither losses nor gradients."""

from typing import Any

import pytest
import torch
from helpers.models import tiny_settings
from helpers.training import TinyTraining, batch_for, tiny_training
from helpers.variants import FEEDBACK, OWN, VARIANTS, WIDE
from torch.utils.flop_counter import FlopCounterMode

import training.module
from jakiro.drafter_settings import DrafterSettings
from jakiro.experts import ExpertsOutput
from training.loss.batch import Batch
from training.loss.normalizers import Normalizers, normalizers_of
from training.loss.objectives import LossTerms, shared_normalizers
from training.loss.positions import gather_examples
from training.loss.settings import TokenLoss

DRAFTED = {
    "draft-vocabulary": VARIANTS["draft-vocabulary"],
    "eagle3": VARIANTS["eagle3"],
    "hybrid-wide-own-head-P1": VARIANTS["hybrid-wide-own-head-P1"],
    "feedback-tail-1": tiny_settings(
        combine="sum", parallel_levels=0, tail_layers=1, trunk=FEEDBACK, draft_vocab_size=23
    ),
    "own-head-P2": tiny_settings(parallel_levels=2, trunk=WIDE, draft_vocab_size=23, **OWN),
    "output-norm-P2": tiny_settings(parallel_levels=2, output_norm="head", draft_vocab_size=23),
}


def partly(settings: DrafterSettings) -> Batch:
    """Return a batch in which some positions have targets for levels 0 and 2, but not for 1."""
    batch = batch_for(settings, [10, 11], [24])
    is_response = batch.is_response & (torch.arange(24) % 2 == 0)
    return Batch(**(vars(batch) | {"is_response": is_response}))


def without_sharing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(training.module, "shared_normalizers", lambda *_: None)


@pytest.mark.parametrize("kind", ["cross_entropy", "total_variation"])
@pytest.mark.parametrize("settings", DRAFTED.values(), ids=DRAFTED)
def test_losses_and_gradients_are_those_without_shared_normalizers(
    settings: DrafterSettings, kind: TokenLoss, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, batch = tiny_training(settings), partly(settings)

    def loss() -> LossTerms:
        return tiny.loss(batch, token_loss=kind, chunk_size=7)

    with FlopCounterMode(display=False) as shared:
        got = loss()
    gradients = tiny.gradients(got.total)
    without_sharing(monkeypatch)
    with FlopCounterMode(display=False) as separate:
        expected = loss()
    assert shared.get_total_flops() < separate.get_total_flops()
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients, tiny.gradients(expected.total), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_large_logits_at_positions_without_a_target_leave_gradients_finite() -> None:
    tiny = tiny_training(VARIANTS["draft-vocabulary"])
    head: Any = tiny.target.model.get_output_embeddings()
    head.weight.data.mul_(1000)
    total = tiny.loss(partly(VARIANTS["draft-vocabulary"]), token_loss="cross_entropy").total
    assert total.isfinite()
    assert all(own is None or own.isfinite().all() for own in tiny.gradients(total))


def _known(tiny: TinyTraining, settings: DrafterSettings, samples: int) -> Normalizers | None:
    batch = batch_for(settings, [10])
    batch = Batch(**(vars(batch) | {"anchors": batch.anchors[:, :samples]}))
    levels = 1 + settings.schedule.parallel_levels
    heads = tiny.reader(24).heads
    return shared_normalizers(tiny.view(batch), batch, heads, levels, tiny.objective.chunk_size)


@pytest.mark.parametrize(
    ("parallel_levels", "draft_vocab_size", "samples", "is_shared"),
    [(0, 23, 1, False), (0, 23, 3, True), (1, 23, 1, True), (1, None, 3, False), (1, 31, 1, False)],
)
def test_normalizers_are_shared_where_this_saves_products(
    parallel_levels: int, draft_vocab_size: int | None, samples: int, is_shared: bool
) -> None:
    drafted = {} if draft_vocab_size is None else {"draft_vocab_size": draft_vocab_size}
    settings = tiny_settings(1, parallel_levels=parallel_levels, trunk=FEEDBACK, **drafted)
    tiny = tiny_training(settings)
    assert (_known(tiny, settings, samples) is not None) == is_shared


@pytest.mark.parametrize("chunk_size", [1, 7, 100])
def test_a_logit_minus_the_normalizer_is_a_log_probability(chunk_size: int) -> None:
    features, head = torch.randn(2, 9, 5), torch.randn(5, 13)
    needed = torch.arange(18).view(2, 9) % 3 > 0
    known = normalizers_of(features, needed, lambda rows: rows @ head, chunk_size)
    log_probs = (features @ head).log_softmax(-1)
    got = features @ head - known.log_sum.unsqueeze(-1)
    torch.testing.assert_close(got[needed], log_probs[needed])
    assert torch.equal(known.best[needed], log_probs.argmax(-1)[needed])


def test_sequences_stay_apart_on_the_meta_device() -> None:
    settings = VARIANTS["draft-vocabulary"]
    batch = batch_for(settings, [10, 11], [24]).to(torch.device("meta"))
    shape = (*batch.token_ids.shape, 2)
    features = torch.empty(*shape, 1, 32, device="meta")
    weights = torch.empty(*shape[:2], 1, device="meta")
    output = ExpertsOutput(features, weights, weights)
    examples = gather_examples(output, features[:, :, 0, 0], batch, 0, 1.0)
    assert examples.sequence_sizes == (24, 24)  # a contrastive loss compares only these
    assert len(examples.indices) == 48
