"""Normalizers that all passes and levels share change neither losses nor gradients."""

import pytest
import torch
from helpers.models import tiny_settings
from helpers.quick import mostly_slow
from helpers.training import batch_for, tiny_training
from helpers.variants import FEEDBACK, OWN, VARIANTS, WIDE
from torch.utils.flop_counter import FlopCounterMode

import training.module
from jakiro.drafter_settings import DrafterSettings
from jakiro.experts import ExpertsOutput
from training.loss.batch import Batch, gather_examples
from training.loss.objectives import LossTerms
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


QUICK = {"draft-vocabulary", "feedback-tail-1", "own-head-P2"}


@pytest.mark.parametrize("name", mostly_slow(DRAFTED, quick=QUICK))
def test_losses_and_gradients_are_those_without_shared_normalizers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = DRAFTED[name]
    tiny, batch = tiny_training(settings), partly(settings)
    kind: TokenLoss = "total_variation" if name == "eagle3" else "cross_entropy"

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
