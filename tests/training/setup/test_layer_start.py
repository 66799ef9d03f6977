"""A drafter that starts from a layer of the target computes what that layer computes."""

from typing import Any

import pytest
import torch
from helpers.families import tiny_family
from helpers.layers import HEADS, layer_settings, outputs_of_layers
from helpers.models import tiny_drafter, tiny_llama
from helpers.training import random_batch
from torch import Tensor, nn
from transformers import PreTrainedModel

from jakiro.target.adapter import TargetAdapter
from jakiro.target.attention_shape import AttentionShape
from moa.trunk import Trunk
from training.setup.layer_fit import LayerFit
from training.setup.layer_start import scale_to_features, start_as_layers, start_from
from training.setup.target_layer import read_attention, read_feed_forward

SHAPE = AttentionShape(**HEADS, rope_theta=10_000.0)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama, grouped heads": {},
    "llama, wide heads": {},
    "gemma": {},  # norms add 1 to their weight
    # Attention scores are divided by the square root of the scalar.
    "gemma2": {"query_pre_attn_scalar": 3, "attn_logit_softcapping": None},
    "granite": {"attention_multiplier": 0.2},  # scores are multiplied by it
    "cohere": {"layer_norm_eps": 1e-6},  # rotated pairs are adjacent
}


def _trunk_for(target: TargetAdapter, layer: int, base: float = 10_000.0) -> AttentionShape:
    """Return the shape of a trunk with the heads of a layer."""
    shape = target.spec.head_shapes[layer]
    return AttentionShape(
        num_heads=4, num_kv_heads=shape.num_kv_heads, head_dim=shape.key_dim, rope_theta=base
    )


def _base_of(model: PreTrainedModel) -> float:
    return float(model.config.rope_parameters["rope_theta"])


def _with_random_norms(model: PreTrainedModel) -> PreTrainedModel:
    for name, weight in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(weight, 0.3, 1.7)
    return model


def _own_attention(model: Any, layer: int, stream: Tensor, positions: Tensor) -> Tensor:
    """Return the output of the layer's norm and attention, computed by the model's own code."""
    count = stream.shape[1]
    mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
    block = model.model.layers[layer]
    added = block.self_attn(
        hidden_states=block.input_layernorm(stream),
        position_embeddings=model.model.rotary_emb(stream, positions),
        attention_mask=mask,
    )[0]
    return added * getattr(block, "residual_multiplier", 1.0)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_both_attentions_equal_the_attention_of_the_layer_they_start_from(family: str) -> None:
    model = _with_random_norms(tiny_family(family, **FAMILIES[family]))
    target = TargetAdapter(model)
    settings = _trunk_for(target, layer=1, base=_base_of(model))
    attention = read_attention(target, 1, settings)
    trunk = Trunk(hidden=32, **settings.model_dump())
    start_from(trunk, [attention])
    stream = torch.randn(2, 9, 32)
    stream -= stream.mean(dim=-1, keepdim=True)  # so that RMS norms equal layer norms
    positions = torch.arange(5, 14)[None].expand(2, -1)
    mask = torch.ones(9, 9, dtype=torch.bool).tril().expand(2, 1, -1, -1)
    expected = stream + _own_attention(model, 1, stream, positions)
    got = trunk.self_attention(stream, positions, mask)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    # If memory is the stream itself, cross-attention computes the same.
    kv = trunk.cross_attention.kv(stream, positions)
    got = trunk.cross_attention(stream, positions, kv, mask)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "changes", "form"),
    [
        ("qwen2", {}, {"attention_bias": "qkv"}),
        ("llama, grouped heads", {"attention_bias": True}, {"attention_bias": "all"}),
        ("granite", {"attention_bias": True}, {"attention_bias": "all"}),  # scales what it adds
        ("cohere", {"attention_bias": True, "layer_norm_eps": 1e-6}, {"attention_bias": "all"}),
        ("qwen3", {}, {"qk_norm": True}),
    ],
)
@torch.no_grad()
def test_a_trunk_starts_with_the_biases_and_the_norms_of_heads_that_it_has(
    family: str, changes: dict[str, Any], form: dict[str, Any]
) -> None:
    model = _with_random_norms(tiny_family(family, **changes))
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.normal_()
    model.model.layers[1].self_attn.scaling *= 1.5
    target = TargetAdapter(model)
    settings = _trunk_for(target, layer=1, base=_base_of(model))
    trunk = Trunk(hidden=32, **settings.model_dump(), **form)
    start_from(trunk, [read_attention(target, 1, settings)])
    stream, positions = torch.randn(2, 9, 32), torch.arange(5, 14)[None].expand(2, -1)
    stream -= stream.mean(dim=-1, keepdim=True)  # so that RMS norms equal layer norms
    mask = torch.ones(9, 9, dtype=torch.bool).tril().expand(2, 1, -1, -1)
    expected = stream + _own_attention(model, 1, stream, positions)
    got = trunk.self_attention(stream, positions, mask)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "width", "tail_layers", "trunk"),
    [
        ("feedback", 48, 0, {}),
        ("hybrid", 64, 0, {}),
        ("hybrid", 64, 1, {}),
        ("hybrid", 64, 0, {"mlp_width": 20}),
        ("feedback", 48, 0, {"attention_bias": "all"}),
    ],
)
@torch.no_grad()
def test_in_the_scale_of_features_the_drafter_computes_what_the_layer_does(
    kind: str, width: int, tail_layers: int, trunk: dict[str, Any]
) -> None:
    model = tiny_family("llama, grouped heads", attention_bias="attention_bias" in trunk)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.normal_()
    target = TargetAdapter(model)
    drafter = tiny_drafter(target, layer_settings(kind, 1, width, tail_layers, **trunk))
    layer = -1 - tail_layers
    attention = read_attention(target, layer, target.spec.attention)
    feed_forward = read_feed_forward(target, layer)
    assert feed_forward is not None
    start_from(drafter.trunk, [attention])
    # With one scale for all channels the result is exact; otherwise norms are approximate.
    zeros = (torch.zeros(32, 64), torch.zeros(32), None)
    fit = LayerFit(torch.full((32,), 0.4), 0.4, *zeros, torch.rand(48), 1.0, 9)
    assert scale_to_features(drafter, [feed_forward], [fit]) == 48
    ids, positions = torch.randint(61, (2, 9)), torch.arange(9).expand(2, -1)
    states = model.model(ids, output_hidden_states=True).hidden_states
    outputs = outputs_of_layers(model, ids)
    mask = torch.ones(9, 9, dtype=torch.bool).tril().expand(2, 1, -1, -1)
    stream = drafter.trunk.self_attention(0.4 * states[layer - 1], positions, mask)
    if drafter.trunk.feed_forward is not None:
        stream = drafter.trunk.feed_forward(stream)
    features = drafter.experts(stream).mean_feature
    torch.testing.assert_close(features, 0.4 * outputs[layer], atol=1e-4, rtol=1e-4)


def test_experts_leave_out_different_units() -> None:
    target = TargetAdapter(tiny_llama())
    drafter = tiny_drafter(target, layer_settings("hybrid", 2, 64))
    attention = read_attention(target, -1, target.spec.attention)
    start_from(drafter.trunk, [attention])
    start_as_layers(drafter, target, [random_batch((24,))], seed=0)
    units = drafter.experts.down.detach().norm(dim=-1) > 0
    assert units.sum(dim=-1).tolist() == [42, 42]  # 7/8 of 48
    first, second = drafter.experts.gate_up.weight.detach().unflatten(0, (2, 2, -1))[:, 0]
    assert not torch.equal(first, second)
