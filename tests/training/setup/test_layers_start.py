"""Blocks and trunks of several layers start as the target's last layers; path features by a fit."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from helpers.families import tiny_family
from helpers.layers import HEADS
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.training import random_batch, tiny_run
from torch.nn import init

from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter
from jakiro.target.attention_shape import AttentionShape
from jakiro.target.step import chain_step
from moa.memory import LayerMixture
from training.loss.batch import look_at_target, read_batch
from training.loss.drafting import draft_all_positions
from training.setup.initialization import initialize
from training.setup.layer_fit import LayerFit
from training.setup.layer_start import (
    scale_to_features,
    start_as_layers,
    start_from,
    start_masks,
    start_memory,
)
from training.setup.path_fit import start_path
from training.setup.target_layer import read_attention

BATCHES = [random_batch((10, 8), (24,), seed=seed) for seed in range(8)]


@pytest.mark.parametrize("family", ["llama, grouped heads", "gemma", "qwen3"])
@torch.no_grad()
def test_attention_of_a_block_is_that_of_the_layer_in_another_scale(family: str) -> None:
    model = tiny_family(family)
    for name, weight in model.named_parameters():
        if "norm" in name:
            init.uniform_(weight, 0.3, 1.7)
    target = TargetAdapter(model)
    shape, theta = target.spec.head_shapes[1], target.spec.attention.rope_theta
    heads = AttentionShape(
        num_heads=4, num_kv_heads=shape.num_kv_heads, head_dim=shape.key_dim, rope_theta=theta
    )
    attention, hidden = read_attention(target, 1, heads), target.spec.hidden_size
    has_norms = attention.head_gains is not None
    trunk = {"kind": "block", "qk_norm": has_norms, **heads.model_dump()}
    levels = {"parallel_levels": 1, "autoregressive_levels": 1, "parallel_heads": "masks"}
    drafter = tiny_drafter(target, tiny_settings(1, trunk=trunk, source="hidden", **levels))
    start_from(drafter.trunk, [attention])
    inputs = (torch.zeros(hidden, 2 * hidden), torch.zeros(hidden), None, None)
    scale_to_features(drafter, [None], [LayerFit(torch.full((hidden,), 3.0), 3.0, *inputs, 1.0, 1)])
    layer = drafter.trunk.self_attention
    assert layer is not None
    ids = torch.randint(0, 61, (1, 7))
    with_states = model.model(ids, output_hidden_states=True).hidden_states
    cache = target.new_cache(1, 7)
    target.forward(chain_step(ids, 0), cache)
    positions = torch.arange(7)[None]
    kv = layer.kv(3.0 * with_states[1], positions)
    kept = cache.slot_layers[1]
    torch.testing.assert_close(kv.keys, kept.keys[:, :, :7], atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(kv.values, kept.values[:, :, :7], atol=1e-4, rtol=1e-3)
    seen = {}
    block = model.model.layers[1].self_attn
    with block.register_forward_hook(lambda _, __, out: seen.update(added=out[0])):
        model.model(ids)
    mask = torch.ones(1, 1, 7, 7, dtype=torch.bool).tril()
    added = layer(3.0 * with_states[1], positions, mask) - 3.0 * with_states[1]
    torch.testing.assert_close(added, 3.0 * seen["added"], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("num_layers", [1, 2])
@torch.no_grad()
def test_memory_of_a_block_has_the_keys_and_values_of_the_targets_layers(num_layers: int) -> None:
    target = TargetAdapter(tiny_llama())
    last = target.spec.num_layers
    own = tuple(range(last - num_layers, last))
    settings = tiny_settings(
        1,
        parallel_levels=2,
        autoregressive_levels=1,
        trunk={"kind": "block", "num_layers": num_layers, **HEADS},
        parallel_heads="masks",
        source="hidden",
        layers=(0, *own),
        mixture="per_layer",
        layer_attention=False,
    )
    drafter = tiny_drafter(target, settings)
    heads = settings.trunk.heads_for(target.spec.attention)
    start_from(drafter.trunk, [read_attention(target, index, heads) for index in own])
    start_memory(drafter, own)
    start_as_layers(drafter, target, BATCHES, seed=0)
    assert isinstance(drafter.memory_encoder, LayerMixture)
    drafter.memory_encoder.mixture *= 100  # each layer reads its own state alone
    ids, positions = torch.randint(0, 61, (1, 9)), torch.arange(9)[None]
    cache = target.new_cache(1, 9, drafter.state_sources.hidden_states)
    target.forward(chain_step(ids, 0), cache)
    encoded = drafter.encode_memory(drafter.state_sources.read(cache, positions), positions)
    for reader, layer in enumerate(own):
        kept = cache.slot_layers[layer]
        for got, expected in zip(encoded[2 * reader :], (kept.keys, kept.values), strict=False):
            torch.testing.assert_close(got, expected[:, :, :9], atol=1e-4, rtol=1e-3)


def _block(target: TargetAdapter, path: str, num_parallel: int) -> JakiroDrafter:
    levels = {"autoregressive_levels": 1, "parallel_levels": num_parallel}
    block = {"trunk": {"kind": "block"} | HEADS, "source": "hidden", "parallel_heads": "masks"}
    drafter = tiny_drafter(target, tiny_settings(1, path=path, **levels, **block))
    assert drafter.path_features is not None
    for weight in drafter.path_features.parameters():
        weight.zero_()
    return drafter


@pytest.mark.parametrize("path", ["embedding", "recurrent"])
@torch.no_grad()
def test_a_path_starts_as_the_least_squares_way_to_the_first_level_below_the_text(
    path: str,
) -> None:
    target = TargetAdapter(tiny_llama())
    drafter, hidden = _block(target, path, 2), target.spec.hidden_size
    start_path(drafter, target, BATCHES)
    for level in (1, 2):
        read, goal = [], []
        for batch in BATCHES:
            index = torch.arange(batch.token_ids.shape[1])
            anchors = torch.where(batch.positions > 0, index - 1, index).unsqueeze(1)
            roots = replace(batch, anchors=anchors)
            cache = target.new_cache(*roots.token_ids.shape, drafter.state_sources.hidden_states)
            view = look_at_target(target, roots, drafter.state_sources, cache)
            (output,) = draft_all_positions(drafter, view, roots, knows_path=False)
            vectors = output.features[:, :, :, 0] if output.waiting is None else output.waiting
            for row, i in product(range(len(batch.token_ids)), index[1 : -level - 1]):
                last = i + level + 1  # the token that the level predicts
                is_one = batch.documents[row, i - 1] == batch.documents[row, last]
                if is_one and batch.is_response[row, last]:
                    parts = [view.embeddings[row, i + level], view.features[row, i + level - 1]]
                    read.append(torch.cat(parts if path == "recurrent" else parts[:1]))
                    goal.append(vectors[row, i + level, 0] - vectors[row, i, level])
        x, y = torch.stack(read), torch.stack(goal)
        kinds = x.square().sum(0).split(hidden)
        ridge = torch.cat([0.03 * kind.mean().expand(len(kind)) for kind in kinds])
        solved = torch.linalg.solve(x.T @ x + ridge.diag(), x.T @ y)
        assert drafter.path_features is not None
        got = drafter.path_features.shifts[level - 1].weight.T
        torch.testing.assert_close(got, solved, atol=1e-3, rtol=1e-3)


@torch.no_grad()
def test_levels_without_a_target_keep_matrices_of_zeros() -> None:
    target = TargetAdapter(tiny_llama())
    drafter = _block(target, "recurrent", 15)
    start_path(drafter, target, [random_batch((10, 8))])  # in which no response is so long
    path = drafter.path_features
    assert path is not None
    first, *_, last = path.shifts
    assert all(part.any() for part in first.weight.chunk(2, dim=1))  # of tokens and of features
    assert not last.weight.any()


@pytest.mark.parametrize("fit_tokens", [0, 64])
def test_layers_before_tail_layers_are_replaced(fit_tokens: int, tmp_path: Path) -> None:
    target = TargetAdapter(tiny_llama())
    trunk = {"kind": "feedback", "num_layers": 2, **HEADS}
    settings = tiny_settings(1, "sum", 0, trunk=trunk, tail_layers=1)
    start = {"attention_layer": "auto", "fit_tokens": fit_tokens}
    run = tiny_run(tmp_path, initialize=start).model_copy(update={"drafter": settings})
    drafter = tiny_drafter(target, settings)
    initialize(drafter, run, target, batches=BATCHES)
    heads = settings.trunk.heads_for(target.spec.attention)
    for layer, index in zip(drafter.trunk.self_attentions, (-3, -2), strict=True):
        attention = read_attention(target, index, heads)
        expected = torch.cat((attention.query, attention.key, attention.value))
        assert torch.equal(layer.project.weight, expected)
        assert torch.equal(layer.output.weight, attention.output)  # the scale is 1


@torch.no_grad()
def test_masks_start_as_the_mean_of_what_they_replace() -> None:
    target = TargetAdapter(tiny_llama())
    settings = tiny_settings(
        1, parallel_levels=2, trunk={"kind": "feedback"}, parallel_heads="masks"
    )
    drafter = tiny_drafter(target, settings)
    start_masks(drafter, target, BATCHES)
    embeddings, features = [], []
    for batch in BATCHES:
        is_token = batch.documents >= 0
        read = read_batch(target, batch, target.new_cache(*batch.token_ids.shape))
        embeddings.append(target.embed(batch.token_ids)[is_token])
        features.append(read.features[is_token])
    assert drafter.level_masks is not None
    starts = (drafter.level_masks.tokens, drafter.level_masks.features)
    for got, parts in zip(starts, (embeddings, features), strict=True):
        assert got is not None
        mean = torch.cat(parts).mean(0).expand_as(got)
        torch.testing.assert_close(got, mean, atol=1e-4, rtol=1e-3)
