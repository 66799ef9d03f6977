"""The rotation of keys is known for targets that rotate whole keys alike, and for no others."""

import pytest
import torch
from helpers.families import tiny_family
from helpers.models import tiny_drafter, tiny_llama, tiny_settings

from jakiro.exchange.vllm_export import export_vllm
from jakiro.target.adapter import TargetAdapter
from jakiro.target.cache import StateSource
from jakiro.target.step import chain_step
from moa.rotary import Rotary
from moa.target_kv import TargetKV

LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
YARN = LINEAR | {"rope_type": "yarn", "original_max_position_embeddings": 16}


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


@pytest.mark.parametrize("parameters", [None, LINEAR, YARN])
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
