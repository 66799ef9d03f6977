"""Drafters that are exported in the layouts of EAGLE-3 run in vLLM without the plug-in's class."""

from pathlib import Path
from typing import Any

import pytest
from helpers.models import tiny_settings
from helpers.vllm_drafters import accepted_per_position, fitted_drafter, simulated
from helpers.vllm_engine import DRAFTS, MARKS, answers, eagle3
from helpers.vllm_world import LENGTH, World

from jakiro.drafter import JakiroDrafter
from jakiro.exchange.eagle3_export import Layout, ServedTarget, export_eagle3, write_export
from jakiro.target.adapter import TargetAdapter

pytestmark = MARKS

TRUNK = {
    "kind": "feedback",
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 32,
    "first_position": False,
    "input": "wide",
    "fusion_layers": (2, 3, 4),
    "input_bias": False,
    "attention_norm": False,
}
FORMS: dict[str, dict[str, Any]] = {
    "published": {"draft_vocab_size": 128, "output_norm": "head"},
    "3.1, normed residual, long context": {
        "output_norm": "feedback",
        "trunk": {
            "fusion_norm": "each",
            "residual": "normed",
            "rope": {"kind": "linear", "factor": 2.0},
        },
    },
}


def _drafter(world: World, form: dict[str, Any]) -> JakiroDrafter:
    settings = tiny_settings(
        num_experts=1,
        combine="sum",
        parallel_levels=0,
        autoregressive_levels=DRAFTS,
        head="own",
        **form | {"trunk": TRUNK | form.get("trunk", {})},
    )
    return fitted_drafter(TargetAdapter(world.model), settings, world.groups, steps=60)


@pytest.mark.parametrize(
    ("form", "layout"), list(zip(FORMS, ("eagle3", "speculators"), strict=True))
)
def test_text_and_accepted_counts_are_those_of_our_forward(
    form: str, layout: Layout, world: World, tmp_path: Path
) -> None:
    drafter = _drafter(world, FORMS[form])
    facts = ServedTarget(str(world.folder), type(world.model).__name__, 512)
    files = export_eagle3(drafter, layout, facts)
    folder = tmp_path / "drafter"
    write_export(files.weights, files.config, folder)
    # A folder of speculators names its target and its number of drafts.
    is_whole = layout == "speculators"
    texts = world.texts[:8]
    (answer,) = answers(
        tmp_path,
        target=str(folder if is_whole else world.folder),
        speculative=None if is_whole else eagle3(folder),
        batches=[{"prompts": [prompt for prompt, _ in texts], "max_tokens": LENGTH}],
    )
    assert answer["texts"] == [text[len(prompt) : len(prompt) + LENGTH] for prompt, text in texts]
    target = TargetAdapter(world.model)
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
    assert counters["spec_decode_num_accepted_tokens"] > 0.5 * len(steps)
