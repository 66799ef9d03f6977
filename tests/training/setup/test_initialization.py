"""Runs whose attention starts from a layer of the target, and layers that are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import tiny_family
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.training import tiny_run
from torch import nn
from transformers import AutoModelForCausalLM

from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError
from jakiro.target.adapter import TargetAdapter
from jakiro.target.attention_shape import AttentionShape
from jakiro.target.cache import TargetState
from jakiro.utils.settings import dump_settings
from moa.trunk import Trunk
from training.ablation.study import Study, StudySettings
from training.setup.initialization import check_initialization, initialize
from training.setup.layer_start import start_from, start_memory
from training.setup.target_layer import is_interleaved, read_attention
from training.train import train

HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}  # as in the tiny targets
SHAPE = AttentionShape(**HEADS, rope_theta=10_000.0)
LAYER = 2  # the last layer of the tiny targets


@pytest.mark.parametrize(
    ("family", "layer", "expected", "dtype"),
    [
        ("llama, grouped heads", 3, False, torch.bfloat16),
        ("olmo2", 3, False, torch.float32),
        ("cohere2", 2, True, torch.bfloat16),
        ("glm4", 3, True, torch.float32),
        ("smollm3", 3, None, torch.bfloat16),
        ("phi", 3, None, torch.float32),  # half of a head is rotated
        ("gpt2", 3, None, torch.float32),
    ],
)
def test_rotation_is_detected_from_the_keys(
    family: str, layer: int, expected: bool | None, dtype: torch.dtype
) -> None:
    assert is_interleaved(TargetAdapter(tiny_family(family).to(dtype)), layer) is expected


@pytest.mark.parametrize(
    ("family", "index", "message"),
    [
        ("llama, grouped heads", 4, r"does not have; expected: an index from -4 to 3; got: 4"),
        ("phi3", 0, "four matrices q_proj, k_proj"),
        ("smollm3", -1, "keys that are rotated over the whole head"),
        ("gemma4, shared rows", -1, "no keys and values of another layer"),
    ],
)
def test_a_layer_that_attention_cannot_start_from_is_refused(
    family: str, index: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_attention(TargetAdapter(tiny_family(family)), index, SHAPE)


@pytest.mark.parametrize(
    ("family", "form", "left"),
    [
        ("qwen2", {}, "attention_bias in drafter.trunk"),
        ("qwen2", {"attention_bias": "qkv"}, ""),
        ("qwen3", {}, "qk_norm in drafter.trunk"),
        ("qwen3", {"qk_norm": True}, ""),
    ],
)
def test_settings_that_would_keep_more_of_the_attention_are_named(
    family: str, form: dict[str, Any], left: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_family(family)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            nn.init.normal_(parameter)
    target = TargetAdapter(model)
    heads = target.spec.attention
    start_from(Trunk(hidden=32, **heads.model_dump(), **form), [read_attention(target, 0, heads)])
    assert left in caplog.text
    assert bool(caplog.text) is bool(left)


def test_drafters_of_all_processes_start_alike(workshop: Path) -> None:
    settings = tiny_run(workshop, drafter={"trunk": HEADS}, initialize={"attention_layer": -1})
    states = []
    for seed in (1, 2):  # different weights before the initialization
        model = AutoModelForCausalLM.from_pretrained(workshop / "target").requires_grad_(False)
        target = TargetAdapter(model.eval())
        drafter = tiny_drafter(target, tiny_settings(), seed=seed)
        initialize(drafter, settings, target)
        states.append(drafter.trunk.state_dict())
    one, other = states
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_by_default_attention_starts_from_the_last_layer_and_has_its_heads(
    workshop: Path,
) -> None:
    trunk = dict.fromkeys(HEADS, None)
    settings = tiny_run(
        workshop,
        drafter={"trunk": trunk},
        initialize={"attention_layer": "auto"},
        optimizer={"warmup_steps": 1},
        steps=1,
    )
    drafter = JakiroDrafter.from_pretrained(train(settings))
    model = AutoModelForCausalLM.from_pretrained(workshop / "target")
    own = TargetAdapter(model).spec.attention
    assert drafter.config.settings.trunk.geometry == own.model_dump()
    start = model.model.layers[-1].self_attn.o_proj.weight
    torch.testing.assert_close(
        drafter.trunk.cross_attention.output.weight, start, atol=0.01, rtol=0.1
    )


def test_an_arm_whose_start_is_not_possible_is_refused_before_any_arm_trains(
    workshop: Path,
) -> None:
    base, delta = workshop / "base.yaml", workshop / "from-target.yaml"
    base.write_text(dump_settings(tiny_run(workshop, steps=2)))
    delta.write_text("initialize: {attention_layer: 0}")
    settings = StudySettings(base=base, config=(delta,), out=workshop / "out", num_prompts=2)
    with pytest.raises(ConfigError, match="in number or size from those of layer 0"):
        Study(settings)
    assert not (workshop / "out").exists()


@pytest.mark.parametrize("layers", [(LAYER,), (0, LAYER, 1)])
@torch.no_grad()
def test_memory_starts_as_the_input_of_the_layer(layers: tuple[int, ...]) -> None:
    model: Any = tiny_llama()
    for name, weight in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(weight, 0.3, 1.7)
    target = TargetAdapter(model)
    drafter = tiny_drafter(
        target, tiny_settings(source="hidden", layers=layers, layer_attention=False)
    )
    heads = drafter.config.settings.trunk.heads_for(target.spec.attention)
    start_from(drafter.trunk, [read_attention(target, LAYER, heads)])
    start_memory(drafter, [LAYER])
    token_ids = torch.randint(0, 61, (1, 9))
    states = model(token_ids, output_hidden_states=True).hidden_states
    positions = torch.arange(9)[None]
    read = torch.stack([states[layer] for layer in layers], dim=2)
    got = drafter.encode_memory(TargetState(read, None), positions)[:2]
    # `test_layer_start` compares the attention itself with that of the layer.
    expected = drafter.trunk.cross_attention.kv(states[LAYER], positions)
    for own, of_layer in zip(got, expected, strict=True):
        torch.testing.assert_close(own, of_layer)


VIEW = {
    "drafter": {
        "trunk": {"kind": "hybrid", "num_heads": None, "num_kv_heads": None, "head_dim": None},
        "memory": {"source": "hidden", "layers": (0, -2), "layer_attention": False},
    },
    "initialize": {"attention_layer": "auto", "memory": "target_layer", "fit_tokens": 64},
}


def test_a_fitted_drafter_starts_with_cross_attention_instead_of_self_attention(
    workshop: Path,
) -> None:
    settings = tiny_run(workshop, **VIEW, steps=2, checkpoint={"every": None})
    settings = settings.model_copy(
        update={"optimizer": settings.optimizer.model_copy(update={"learning_rate": 0.0})}
    )
    train(settings)
    drafter = JakiroDrafter.from_pretrained(settings.run_folder / "drafter")
    model: Any = AutoModelForCausalLM.from_pretrained(workshop / "target")
    trunk, own = drafter.trunk, model.model.layers[LAYER].self_attn
    assert trunk.cross_attention is not None
    assert not trunk.self_attention.output.weight.any()
    scale = trunk.cross_attention.output.weight / own.o_proj.weight
    torch.testing.assert_close(scale, scale[:, :1].expand_as(scale), rtol=1e-3, atol=1e-3)
    weight = trunk.cross_attention.key_value.weight
    torch.testing.assert_close(weight, torch.cat((own.k_proj.weight, own.v_proj.weight)))


@pytest.mark.parametrize(
    "memory",
    [
        {"source": "hidden", "layers": (0, 1), "layer_attention": False},
        {"source": "hidden", "layers": (LAYER,), "layer_attention": False, "common_width": 8},
    ],
)
def test_memory_that_cannot_be_the_input_of_the_layer_is_refused(
    workshop: Path, memory: dict[str, Any]
) -> None:
    drafter = VIEW["drafter"] | {"memory": memory}
    settings = tiny_run(workshop, **(VIEW | {"drafter": drafter}))
    target = TargetAdapter(AutoModelForCausalLM.from_pretrained(workshop / "target"))
    with pytest.raises(ConfigError, match="view of layer 2"):
        check_initialization(settings, target)
