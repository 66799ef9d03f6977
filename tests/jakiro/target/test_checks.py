"""What is read from a target: the geometry of its attention, and the rotation of its keys."""

import warnings
from typing import Any

import pytest
import torch
from helpers.families import tiny_family
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from transformers import DynamicCache

from jakiro.drafter_settings import TrunkSettings
from jakiro.errors import ConfigError
from jakiro.exchange.vllm_export import export_vllm
from jakiro.target.adapter import TargetAdapter
from jakiro.target.attention_shape import AttentionShape
from jakiro.target.cache import StateSource
from jakiro.target.checks import cache_argument
from jakiro.target.step import chain_step
from moa.layers import Rotary
from moa.target_kv import TargetKV

LLAMA3 = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, rope_theta=500_000.0)
LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
YARN = LINEAR | {"rope_type": "yarn", "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("family", "changes", "heads"),
    [
        ("llama, grouped heads", {"rope_theta": 500_000.0}, (4, 2, 8, 500_000.0)),
        ("llama, wide heads", {}, (4, 2, 12, 10_000.0)),
        ("deepseek_v3", {}, (1, 1, 64, 10_000.0)),  # keys and values differ in size
        ("gpt2", {}, (4, 4, 8, 10_000.0)),
    ],
)
def test_the_geometry_is_read_from_the_target(
    family: str, changes: dict[str, Any], heads: tuple[int, int, int, float]
) -> None:
    attention = TargetAdapter(tiny_family(family, **changes)).spec.attention
    assert tuple(attention.model_dump().values()) == heads


def test_given_settings_stay_and_the_others_are_the_targets() -> None:
    heads = TrunkSettings(num_heads=16, rope_theta=100.0).heads_for(LLAMA3)
    assert heads == LLAMA3.model_copy(update={"num_heads": 16, "rope_theta": 100.0})
    with pytest.raises(ConfigError, match="expected: a multiple of 8 heads; got: 12"):
        TrunkSettings(num_heads=12).heads_for(LLAMA3)


def test_the_installed_transformers_does_not_warn_of_the_name_of_the_cache() -> None:
    model, ids = tiny_llama(), torch.tensor([[1, 2, 3]])
    for module in (model, model.get_decoder()):
        cache = DynamicCache(config=model.config)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            module(input_ids=ids, **{cache_argument(module): cache})
        assert cache.get_seq_length() == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frequencies_are_those_of_the_config(dtype: torch.dtype) -> None:
    model = tiny_llama(rope_parameters={"rope_type": "default", "rope_theta": 100.0})
    rotation = TargetAdapter(model.to(dtype)).spec.key_rotation
    assert rotation is not None
    assert rotation.scale == 1.0
    # `to` has rounded the target's own frequencies.
    expected = pytest.approx([100.0 ** (-n / 4) for n in range(4)], rel=1e-2)
    assert rotation.frequencies == expected


def test_changes_for_long_contexts_are_part_of_the_rotation() -> None:
    slow = TargetAdapter(tiny_llama(rope_parameters=LINEAR)).spec.key_rotation
    assert slow is not None
    assert slow.frequencies == pytest.approx([100.0 ** (-n / 4) / 4 for n in range(4)])
    scaled = TargetAdapter(tiny_llama(rope_parameters=YARN)).spec.key_rotation
    assert scaled is not None
    assert scaled.scale > 1.1


@pytest.mark.parametrize(
    "name",
    [
        "gpt_neox",  # a part of the head is rotated
        "gemma3",  # two bases
        "glm4",  # adjacent channels are paired
    ],
)
def test_other_targets_have_no_common_rotation(name: str) -> None:
    assert TargetAdapter(tiny_family(name)).spec.key_rotation is None


@pytest.mark.parametrize("parameters", [None, YARN])
def test_memory_is_made_from_keys_before_their_rotation(parameters: dict[str, object]) -> None:
    target = TargetAdapter(tiny_llama(**{"rope_parameters": parameters} if parameters else {}))
    trunk = {"first_position": False}
    drafter = tiny_drafter(target, tiny_settings(rotated=False, layers=(2, 0), trunk=trunk))
    tokens, positions = torch.randint(61, (1, 9)), torch.arange(9)[None]
    cache = target.new_cache(1, 9, (0, 2))
    with torch.no_grad():
        target.forward(chain_step(tokens, 0), cache)
        keys, values = drafter.encode_memory(
            drafter.state_sources.read(cache, positions), positions
        )
        # The export copies the projections of the target.
        exported = export_vllm(drafter, target)
        facts = exported.config["jakiro"]["facts"]["kv"]
        rotary = Rotary(8, 1.0, tuple(facts["frequencies"]), facts["scale"])
        copy = TargetKV(2, 32, facts["width"], facts["norm_eps"], rotary)
        parts = ("norm", "weight")
        copy.load_state_dict({name: exported.weights[f"target_kv.{name}"] for name in parts})
        inputs = cache.state(positions, StateSource("hidden", (2, 0)))[0]
        memory = drafter.memory_encoder(copy(inputs)[None])
        expected = drafter.trunk.cross_attention.kv(memory, positions)
    torch.testing.assert_close(keys, expected.keys, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(values, expected.values, atol=1e-4, rtol=1e-4)
