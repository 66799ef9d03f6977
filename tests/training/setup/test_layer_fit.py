"""The fit with which a drafter starts as the layer of the target that it replaces."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import tiny_family
from helpers.layers import HEADS, layer_settings, outputs_of_layers
from helpers.models import tiny_drafter, tiny_llama
from helpers.training import random_batch, tiny_run
from peft import LoraConfig, get_peft_model
from torch.nn.functional import pad

from jakiro.target.adapter import TargetAdapter
from training.setup.initialization import is_fitted
from training.setup.layer_fit import fit_layers
from training.setup.layer_start import scale_to_features
from training.setup.target_layer import (
    LayerAttention,
    LayerFeedForward,
    read_attention,
    read_feed_forward,
)
from training.train import train

TWO = {"num_layers": 2}
TAIL = {"tail_layers": 1, "experts": {"combine": "sum"}, "schedule": {"parallel_levels": 0}}


@torch.no_grad()
def test_the_fit_is_least_squares_over_all_tokens_but_the_first_of_a_document() -> None:
    model = tiny_llama()
    target = TargetAdapter(model)
    drafter = tiny_drafter(target, layer_settings("feedback", 2, 20))
    batches = [random_batch((10, 8), (24,), seed=seed) for seed in range(12)]
    feed_forward = read_feed_forward(target, -1)
    (fit,) = fit_layers(drafter, target, [-1], [feed_forward], batches)
    read, inputs, outputs, features = _by_hand(target, drafter, batches)
    assert fit.num_tokens == len(read) == 12 * (9 + 7 + 23)
    scale = (features * outputs).sum(0) / outputs.square().sum(0)
    torch.testing.assert_close(fit.scale, scale, atol=1e-5, rtol=1e-4)
    read = pad(read, (0, 1), value=1.0)
    ridge = 0.03 * (read * read).sum(0).mean()
    solved = torch.linalg.solve(read.T @ read + ridge * torch.eye(65), read.T @ inputs)
    torch.testing.assert_close(fit.weight, (solved[:-1] * scale).T, atol=1e-4, rtol=1e-3)
    rest = (inputs - read @ solved).square().sum() / (inputs - inputs.mean(0)).square().sum()
    assert fit.explained == pytest.approx(1 - float(rest), abs=1e-3)
    assert fit.strengths is not None
    assert fit.strengths.shape == (48,)


@torch.no_grad()
def test_fused_states_are_fitted_beside_features_and_encoded_like_features() -> None:
    target = TargetAdapter(tiny_llama())
    settings = layer_settings("feedback", 1, 20, tail_layers=1, fusion_layers=(1, 2))
    drafter = tiny_drafter(target, settings)
    batches = [random_batch((24,), seed=seed) for seed in range(12)]
    (fit,) = fit_layers(drafter, target, [-2], [None], batches)
    read, inputs, *_ = _by_hand(target, drafter, batches, layer=-2)
    assert torch.equal(fit.scale, torch.ones(32))
    assert fit.shrinkage == 1.0
    fused = torch.cat([_fused(target, batch, (1, 2)) for batch in batches])
    ones = torch.ones(len(read), 1)
    by_features = torch.cat((read, ones, torch.zeros(len(read), 64)), dim=1)
    by_fused = torch.cat((read[:, :32], torch.zeros(len(read), 32), ones, fused), dim=1)
    rows = torch.cat((by_features, by_fused))
    kinds = rows.square().sum(0).split((32, 32, 1, 64))  # tokens, features, 1, fused states
    ridge = torch.cat([kind.mean().expand(len(kind)) for kind in kinds])
    solved = torch.linalg.solve(rows.T @ rows + (0.03 * ridge).diag(), rows.T @ inputs.repeat(2, 1))
    torch.testing.assert_close(fit.weight, solved[:64].T, atol=1e-4, rtol=1e-3)
    assert fit.encoder is not None
    by_way_of_encoder = fused @ fit.encoder.T @ fit.weight[:, 32:].T
    wanted = fused @ solved[65:]
    assert (by_way_of_encoder - wanted).square().mean() < 0.05 * wanted.square().mean()
    missed = (inputs.repeat(2, 1) - rows @ solved).square().sum()
    assert fit.explained == pytest.approx(
        1 - float(missed / (2 * (inputs - inputs.mean(0)).square().sum())), abs=1e-3
    )
    scale_to_features(drafter, [None], [fit])
    state = torch.randn(1, 3, 2, 32)
    encoded = drafter.feature_encoder(state)
    torch.testing.assert_close(encoded, state.flatten(2) @ fit.encoder.T)


def _fused(target: TargetAdapter, batch: Any, layers: tuple[int, ...]) -> torch.Tensor:
    states = target.model.model(batch.token_ids, output_hidden_states=True).hidden_states
    return torch.cat([states[layer] for layer in layers], dim=-1)[0, :-1]


def _by_hand(
    target: TargetAdapter, drafter: Any, batches: list[Any], layer: int = -1
) -> list[torch.Tensor]:
    """Return the drafter's inputs, a layer's inputs and outputs, and the target's features.

    Hidden states come from the model's own forward. Each document's first token is left out.
    """
    parts: list[list[torch.Tensor]] = [[], [], [], []]
    for batch in batches:
        for token_ids, documents in zip(batch.token_ids, batch.documents, strict=True):
            for number in range(int(documents.max()) + 1):
                ids = token_ids[documents == number][None]
                states = target.model.model(ids, output_hidden_states=True).hidden_states
                outputs, features = outputs_of_layers(target.model, ids), states[-1]
                embeddings = target.embed(ids)[:, 1:]
                read = drafter.trunk.feature_input.normed(embeddings, features[:, :-1])
                goals = (states[layer - 1], outputs[layer], features)
                found = (read, *(goal[:, 1:] for goal in goals))
                for column, part in zip(parts, found, strict=True):
                    column.append(part[0])
    return [torch.cat(column) for column in parts]


def test_feed_forward_parts_are_read_as_they_add_to_the_stream() -> None:
    model = tiny_family("granite")
    feed_forward = read_feed_forward(TargetAdapter(model), -1)
    assert feed_forward is not None
    torch.testing.assert_close(
        feed_forward.down, 0.7 * model.model.layers[-1].mlp.down_proj.weight.detach()
    )


# PEFT uses a deprecated name of transformers: https://github.com/huggingface/peft
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_of_the_target_are_part_of_the_layer() -> None:
    adapted = ["q_proj", "v_proj", "gate_proj", "down_proj"]
    config = LoraConfig(r=2, target_modules=adapted, init_lora_weights=False)
    target = TargetAdapter(get_peft_model(tiny_family("qwen2"), config).eval())
    attention, feed_forward = _read_last(target)
    merged_attention, merged = _read_last(TargetAdapter(target.model.merge_and_unload()))
    for name in ("query", "key", "value", "output"):
        torch.testing.assert_close(getattr(attention, name), getattr(merged_attention, name))
    for name in ("gate", "up", "down"):
        torch.testing.assert_close(getattr(feed_forward, name), getattr(merged, name))


def _read_last(target: TargetAdapter) -> tuple[LayerAttention, LayerFeedForward | None]:
    return read_attention(target, -1, target.spec.attention), read_feed_forward(target, -1)


def _first_validation_loss(folder: Path, **changes: Any) -> float:
    settings = tiny_run(
        folder,
        drafter={"trunk": {"kind": "hybrid", **HEADS}},
        objective={"token_weight": 0.0, "feature_weight": 1.0, "contrast_weight": 0.0},
        optimizer={"learning_rate": 1e-9},
        steps=2,
        **changes,
    )
    train(settings)
    lines = (settings.run_folder / "metrics.jsonl").read_text().splitlines()
    return float(json.loads(lines[-1])["evaluation"]["validation"]["loss"])


def test_a_run_starts_with_a_fit_of_its_input_and_fits_it_once(
    workshop: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        fitted = _first_validation_loss(
            workshop,
            initialize={"attention_layer": "auto", "fit_tokens": 300},
            run_folder=str(workshop / "fitted"),
            checkpoint={"every": 1},
        )
        assert caplog.text.count("starts as layer") == 1
        attention_alone = _first_validation_loss(
            workshop, initialize={"attention_layer": "auto", "fit_tokens": 0}
        )
        assert caplog.text.count("starts as layer") == 1
    assert fitted < 0.8 * attention_alone


@pytest.mark.parametrize(
    ("drafter", "initialize", "expected"),
    [
        ({"trunk": {"kind": "hybrid", **HEADS}}, {"attention_layer": "auto"}, True),
        ({"trunk": {"kind": "feedback", **HEADS}}, {"attention_layer": -1}, True),
        ({"trunk": {"kind": "moa", **HEADS}}, {"attention_layer": "auto"}, False),
        ({"trunk": {"kind": "hybrid", **HEADS}}, {"attention_layer": 0}, False),
        ({"trunk": {"kind": "hybrid", **HEADS}, **TAIL}, {"attention_layer": "auto"}, True),
        ({"trunk": {"kind": "hybrid", **HEADS}, **TAIL}, {"attention_layer": -1}, False),
        ({"trunk": {"kind": "hybrid", **HEADS}}, {"fit_tokens": 0, "attention_layer": -1}, False),
        (
            {"trunk": {"kind": "hybrid", **HEADS}},
            {"drafter": "x", "attention_layer": "auto"},
            False,
        ),
        ({"trunk": {"kind": "hybrid"}}, {"attention_layer": "auto"}, False),  # different heads
        (
            {"trunk": {"kind": "feedback", **HEADS, "num_layers": 2}},
            {"attention_layer": "auto"},
            True,
        ),
        (
            {"trunk": {"kind": "hybrid", **HEADS, "num_layers": 2}},
            {"attention_layer": "auto"},
            False,
        ),
        *(
            ({"trunk": {"kind": "feedback", **HEADS, **form}}, {"attention_layer": "auto"}, False)
            for form in ({"tokens": "trigram"}, {"num_layers": 0})
        ),
    ],
)
def test_only_a_drafter_with_the_form_of_the_layer_is_fitted(
    drafter: dict[str, Any], initialize: dict[str, Any], expected: bool, workshop: Path
) -> None:
    settings = tiny_run(workshop, drafter=drafter, initialize=initialize)
    assert is_fitted(settings, TargetAdapter(tiny_llama())) is expected
