"""Exported drafters for the plug-in: their weights and facts, and what an import of them gives."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.variants import FEEDBACK, FUSED, HYBRID, NO_FIRST, OWN, WIDE
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from inference import vllm_plugin
from inference.vllm_plugin.checks import check_draft_ids
from jakiro.config import JakiroConfig
from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError, TargetNotSupported
from jakiro.exchange.eagle3_export import write_export
from jakiro.exchange.vllm_export import ARCHITECTURE, export_vllm
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.settings import merge


def _drafter(target: TargetAdapter, **arguments: Any) -> JakiroDrafter:
    arguments["trunk"] = merge({"kind": "hybrid"} | NO_FIRST, arguments.get("trunk") or {})
    return tiny_drafter(target, tiny_settings(**arguments))


def test_the_plugin_and_the_export_name_the_same_architecture() -> None:
    assert ARCHITECTURE == vllm_plugin.ARCHITECTURE


FORMS: dict[str, tuple[dict[str, Any], int, list[int]]] = {
    "feedback": ({"trunk": FEEDBACK}, 32, [3]),
    "fused": ({"trunk": FUSED, "combine": "sum"}, 32, [0, 2, 3]),
    "eagle3": ({"trunk": WIDE, "draft_vocab_size": 23, **OWN}, 32, [0, 2, 3]),
    "hybrid, hidden": ({"source": "hidden", "layers": (3, 1)}, 64 + 4, [1, 3]),
    "moa, hidden": (
        {"trunk": {"kind": "moa", "mlp_width": 20}, "source": "hidden", "layers": (2,)},
        32 + 4,
        [2],
    ),
    "hybrid, keys and values": ({"trunk": HYBRID}, 32 + 3 * 32 + 4, [0, 1, 2, 3]),
    "hybrid, keys before rotation": ({"trunk": HYBRID, "rotated": False}, 64 + 4, [0, 1, 2, 3]),
    "moa, two layers": ({"trunk": {"kind": "moa"}, "layers": (2, 0)}, 2 * 32 + 4, [0, 2]),
}


@pytest.mark.parametrize("name", FORMS)
def test_an_export_contains_the_first_level(name: str, tmp_path: Path) -> None:
    arguments, width, layers = FORMS[name]
    target = TargetAdapter(tiny_llama())
    drafter = _drafter(target, **arguments)
    if drafter.draft_ids is not None:
        drafter.draft_ids.copy_(2 * torch.arange(23) + 3)
    exported = export_vllm(drafter, target)
    config, weights = exported.config, exported.weights
    assert config["hidden_size"] == width  # a multiple of the 4 heads
    assert config["eagle_aux_hidden_state_layer_ids"] == layers
    jakiro = config["jakiro"]
    again = JakiroDrafter(JakiroConfig(drafter=jakiro["drafter"], target=jakiro["target"]))
    own = {key for key in again.state_dict() if not key.startswith("own_head")}
    copies = {key for key in weights if key.startswith(("target_", "lm_head"))}
    assert weights.keys() == own | copies
    assert ("target_norm.weight" in copies) is (3 in layers)
    assert ("target_kv.weight" in copies) is ("source" not in arguments and width > 32)
    for key in own:
        assert weights[key].shape == again.state_dict()[key].shape, key
        assert torch.equal(weights[key], drafter.state_dict()[key][: len(weights[key])]), key
    settings = drafter.config.settings
    schedule = settings.schedule.model_copy(update={"parallel_levels": 0})
    assert again.config.settings == settings.model_copy(update={"schedule": schedule})
    write_export(weights, config, tmp_path / "exported")
    stored = load_file(tmp_path / "exported" / "model.safetensors")
    assert all(torch.equal(part, weights[key]) for key, part in stored.items())


def test_rows_of_the_targets_head_are_copied_for_a_draft_vocabulary() -> None:
    target = TargetAdapter(tiny_llama())
    drafter = _drafter(target, trunk=FEEDBACK, draft_vocab_size=23)
    drafter.draft_ids.copy_(2 * torch.arange(23) + 3)
    exported = export_vllm(drafter, target)
    assert torch.equal(exported.weights["lm_head.weight"], target.head.weight[drafter.draft_ids])
    assert exported.config["draft_vocab_size"] == 23
    check_draft_ids(exported.weights["draft_ids"], exported.config["jakiro"]["facts"]["draft_ids"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"trunk": {"first_position": True}}, "first_position of False"),
        ({"trunk": {"tokens": "trigram"}}, "tokens of single"),
        ({"trunk": {"num_layers": 2}}, "num_layers of 1"),
        ({"num_experts": 4, "active_experts": 1}, "active_experts of null"),
        ({"combine": "sum", "parallel_levels": 0, "tail_layers": 1}, "tail_layers of 0"),
    ],
)
def test_drafters_that_vllm_cannot_run_are_refused(arguments: dict[str, Any], message: str) -> None:
    target = TargetAdapter(tiny_llama())
    with pytest.raises(ConfigError, match=message):
        export_vllm(_drafter(target, **arguments), target)


SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": None,
}


def test_memory_from_keys_and_values_needs_layers_like_those_of_llama() -> None:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, initializer_range=0.3)).eval()
    target = TargetAdapter(model)
    with pytest.raises(TargetNotSupported, match=r"norms of keys; got: Qwen3ForCausalLM"):
        export_vllm(_drafter(target), target)
    export_vllm(_drafter(target, source="hidden"), target)
    biased = TargetAdapter(tiny_llama(attention_bias=True))
    torch.nn.init.ones_(biased.decoder.layers[1].self_attn.k_proj.bias)
    with pytest.raises(TargetNotSupported, match="without biases"):
        export_vllm(_drafter(biased), biased)
