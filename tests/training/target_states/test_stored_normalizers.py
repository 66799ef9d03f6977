"""Normalizers on disk save products with the target's head, and change no loss beyond rounding."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.models import tiny_llama
from helpers.target_states import (
    batches,
    both_views,
    offline_run,
    with_drafter,
    write_target_states,
)
from helpers.training import curve, tiny_run, write_jsonl
from helpers.variants import VARIANTS
from torch import nn

from jakiro.target.checks import CausalLM
from training.config import TrainSettings
from training.loss.heads import normalizers_of
from training.setup.preparation import prepare
from training.target_states.store import open_target_states
from training.train import train

DRAFTED = VARIANTS["draft-vocabulary"]


@pytest.fixture
def folder(workshop: Path) -> Path:
    """Return a folder whose documents have prompts and fill the sequences only in part."""
    random = np.random.default_rng(0)
    lengths = random.integers(15, 40, 24).tolist()
    write_jsonl(
        workshop / "texts.jsonl",
        (
            {
                "input_ids": random.integers(3, 300, length).tolist(),
                "loss_mask": [0] * (length // 2) + [1] * (length - length // 2),
            }
            for length in lengths
        ),
    )
    return workshop


def drafted_run(folder: Path, dtype: str = "fp32", **changes: Any) -> TrainSettings:
    return with_drafter(offline_run(folder, dtype, **changes), DRAFTED)


def check_normalizers(settings: TrainSettings, model: CausalLM | None = None) -> None:
    """Check that the stored normalizers are those of the features that the run reads."""
    write_target_states(settings, model)
    adapter = prepare(settings, model).target
    for batch, (online, offline) in zip(
        batches(settings, model), both_views(settings, model), strict=True
    ):
        assert online.normalizers is None
        assert offline.normalizers is not None
        needed = batch.targets_exist(1)
        assert needed.any()
        assert not needed.all()
        features = offline.features.to(adapter.dtype)
        expected = normalizers_of(features, needed, adapter.logits, 1000)
        for got, own in zip(offline.normalizers, expected, strict=True):
            torch.testing.assert_close(got, own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("target", "stored", "engine"),
    [
        ("fp32", "fp32", "fp32"),
        ("fp32", "bf16", "bf16"),
        ("bf16", "bf16", "fp32"),
    ],
)
def test_stored_normalizers_are_those_of_the_features_that_a_run_reads(
    folder: Path, target: str, stored: str, engine: str
) -> None:
    changes: dict[str, Any] = {"target": {"dtype": target}, "engine": {"dtype": engine}}
    check_normalizers(drafted_run(folder, stored, **changes))


def test_features_that_are_rounded_again_have_no_stored_normalizers(folder: Path) -> None:
    settings = drafted_run(folder, engine={"dtype": "bf16"})
    write_target_states(settings)
    assert all(offline.normalizers is None for _, offline in both_views(settings))


def test_a_head_without_rows_of_its_own_stores_no_normalizers(folder: Path) -> None:
    class Quantized(nn.Linear):
        pass

    model = tiny_llama(vocab=300)
    model.lm_head.__class__ = Quantized
    settings = drafted_run(folder)
    assert not write_target_states(settings, model).index.has_normalizers
    assert open_target_states(prepare(settings, model)) is not None


def test_an_offline_run_with_a_draft_vocabulary_has_nearly_the_curve_of_the_online_one(
    folder: Path,
) -> None:
    changes: dict[str, Any] = {"steps": 4, "evaluation": {"num_prompts": 0}}
    online = with_drafter(tiny_run(folder, run_folder=str(folder / "online"), **changes), DRAFTED)
    offline = drafted_run(folder, **changes)
    write_target_states(offline)
    for settings in (online, offline):
        train(settings)
    assert curve(offline) == pytest.approx(curve(online), rel=1e-4)
