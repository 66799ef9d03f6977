"""Fused layers equal those of transformers, and layers that would differ stay as they are."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.families import EVERY_FAMILY, FAMILIES, tiny_family, tiny_model
from helpers.models import tiny_llama
from helpers.quick import mostly_slow
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from jakiro.target import fused_decoder, fused_layer
from jakiro.target.adapter import TargetAdapter
from jakiro.target.fused_layer import Design
from jakiro.target.step import chain_step

# Latent or interleaved attention, layers that share keys or read embeddings of their own, learned
# positions: these families keep the layers of transformers.
NOT_FUSED = {
    "deepseek_v3",
    "falcon",
    "gemma3n",
    "gemma4, heads of two widths",
    "gemma4, shared rows",
    "gpt2",
    "gpt_neox",
    "gptj",
    "llama4",
    "opt",
    "opt, projected",
}
IDS = torch.arange(12)[None] % 7


def _features(target: TargetAdapter, hidden_states: tuple[int, ...] = ()) -> list[Tensor]:
    """Return features, stored keys, values and hidden states."""
    cache = target.new_cache(1, 16, hidden_states)
    with torch.inference_mode():
        features = target.forward(chain_step(IDS, 0), cache).features
    return [features, *cache._all_blocks]


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_a_fused_family_computes_the_same(family: str) -> None:
    target = TargetAdapter(tiny_family(family))
    states = () if target.spec.num_hidden_states is None else (1, target.spec.num_hidden_states - 1)
    expected = _features(target, states)
    target.fuse()
    assert target.modules.num_fused == (0 if family in NOT_FUSED else target.spec.num_layers)
    for got, own in zip(_features(target, states), expected, strict=True):
        torch.testing.assert_close(got, own, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("family", mostly_slow(FAMILIES, quick=["phi", "mixtral"]))
def test_a_fused_family_keeps_half_precision(family: str) -> None:
    target = TargetAdapter(tiny_family(family, seed=1).to(torch.bfloat16))
    target.fuse()
    step = replace(chain_step(IDS, 0), start=None)  # as for sequences of several lengths
    with torch.inference_mode():
        features = target.forward(step, target.new_cache(1, 16)).features
    assert features.dtype == torch.bfloat16


def test_layers_that_differ_only_at_late_positions_stay_as_they_are() -> None:
    rope = {"rope_theta": 1e4, "rope_type": "default", "original_max_position_embeddings": 32}
    for beta, count in ((0.0, 4), (0.5, 0)):  # the factor of queries by their position
        scaled = rope | {"llama_4_scaling_beta": beta}
        model = tiny_model("Ministral3ForCausalLM", head_dim=8, rope_parameters=scaled)
        target = TargetAdapter(model)
        target.fuse()
        assert target.modules.num_fused == count


class _OtherAttention(LlamaAttention):
    """Attention in a file without an attention function, unlike those of transformers."""


class _OtherMLP(LlamaMLP):
    """A network that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 1.01 * super().forward(x)


@pytest.mark.parametrize(("part", "kind"), [("self_attn", _OtherAttention), ("mlp", _OtherMLP)])
def test_layers_of_other_code_stay_as_they_are(part: str, kind: type[nn.Module]) -> None:
    model = tiny_llama()
    for layer in model.model.layers:
        getattr(layer, part).__class__ = kind
    target = TargetAdapter(model)
    target.fuse()
    assert target.modules.num_fused == 0


@pytest.mark.parametrize("place", ["mlp", "self_attn.q_proj", ""])
def test_a_layer_with_a_hook_stays_as_it_is(place: str) -> None:
    model = tiny_llama()
    watched = model.model.layers[-1].get_submodule(place)
    watched.register_forward_hook(lambda module, args, output: 1.001 * output)
    target = TargetAdapter(model)
    expected = _features(target)
    target.fuse()
    assert target.modules.num_fused == target.spec.num_layers - 1
    for got, own in zip(_features(target), expected, strict=True):
        torch.testing.assert_close(got, own, atol=1e-5, rtol=1e-5)


def _frame_of(target: TargetAdapter) -> object:
    return vars(target.modules.layers).get("forward")


@pytest.mark.parametrize(
    ("family", "has_frame"),
    [("llama, tied", True), ("gemma", True), ("gemma3", False), ("granite", False)],
)
def test_what_is_around_the_layers_is_left_out_only_if_it_changes_nothing(
    family: str, has_frame: bool
) -> None:
    target = TargetAdapter(tiny_family(family))
    target.fuse()
    assert isinstance(_frame_of(target), fused_decoder._Frame) is has_frame
    assert target.modules.num_fused == target.spec.num_layers


def test_a_replaced_decoder_is_not_left_out() -> None:
    model = tiny_llama()
    model.model.forward = model.model.forward
    target = TargetAdapter(model)
    target.fuse()
    assert target.modules.num_fused == target.spec.num_layers
    assert not isinstance(_frame_of(target), fused_decoder._Frame)


@pytest.mark.parametrize("fault", ["epsilon", "order of norm and rotation", "rotation"])
def test_a_fused_layer_that_would_be_wrong_is_not_used(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(fused_layer.FusedLayer):
        def __init__(self, layer: nn.Module, make: Any, design: Design) -> None:
            if fault == "order of norm and rotation":
                design = design._replace(rotates_first=True)
            if fault == "rotation":
                design = design._replace(rotation="neighbours")
            super().__init__(layer, make, design)
            if fault == "epsilon":
                self.first.keywords["eps"] *= 100

    monkeypatch.setattr(fused_decoder, "FusedLayer", Wrong)
    target = TargetAdapter(tiny_model("Qwen3ForCausalLM", head_dim=8, rms_norm_eps=1e-3))
    target.fuse()
    assert target.modules.num_fused == 0
