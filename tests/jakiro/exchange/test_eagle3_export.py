"""An exported drafter is imported again with the same weights, and drafts as EAGLE-3 does."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.imports import assert_drafts_equal, converted, imported
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.published import (
    PublishedEagle3,
    eagle3_config,
    eagle3_weights,
    save_published,
)
from helpers.variants import FEEDBACK, OWN, WIDE

from jakiro.drafter import JakiroDrafter
from jakiro.drafter_settings import ScheduleSettings
from jakiro.errors import ConfigError
from jakiro.exchange.checkpoint import read_checkpoint
from jakiro.exchange.eagle3_export import (
    Layout,
    ServedTarget,
    export_eagle3,
    serve_command,
    write_export,
)
from jakiro.exchange.families import plan_import
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.settings import merge

FACTS = ServedTarget("owner/target", "LlamaForCausalLM", 128)
LAYERS = (2, 3, 5)
IDS = {"eagle_aux_hidden_state_layer_ids": list(LAYERS)}
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "eagle3": ({}, {}),
    "all tokens": ({"num_drafted": 61}, {"num_drafted": 61}),
    "eagle-3.1": ({"fused": "each"}, {"norm_output": True}),
    "long contexts": ({}, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "gpt-oss": ({"fused": "all"}, {"norm_before_residual": True}),
}


def _exported(drafter: JakiroDrafter, layout: Layout, folder: Path) -> Path:
    exported = export_eagle3(drafter, layout, FACTS)
    write_export(exported.weights, exported.config, folder)
    return folder


@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
@pytest.mark.parametrize("name", FORMS)
def test_importing_an_export_gives_the_same_tensors_and_settings(
    name: str, layout: Layout, tmp_path: Path
) -> None:
    weights_of, config_of = FORMS[name]
    weights, model = eagle3_weights(**weights_of), tiny_llama(num_hidden_layers=6)
    config = eagle3_config(**IDS, **config_of)
    first = converted(save_published(tmp_path / "published", weights, config), model)
    folder = _exported(first, layout, tmp_path / "exported")
    again = converted(folder, model)
    assert again.config.settings == first.config.settings
    assert again.state_dict().keys() == first.state_dict().keys()
    for key, part in first.state_dict().items():
        assert torch.equal(again.state_dict()[key], part), key
    assert len(plan_import(read_checkpoint(folder)).candidates(6)) == 1
    if layout == "eagle3":  # the tensors of the published drafter, bit for bit
        checkpoint = read_checkpoint(folder)
        assert checkpoint.tensors.keys() == weights.keys()
        for key, part in weights.items():
            assert torch.equal(checkpoint.tensor(key), part), key


def test_an_own_drafter_drafts_as_the_published_architecture_does(tmp_path: Path) -> None:
    model = tiny_llama(num_hidden_layers=6).double()
    trunk = WIDE | {"fusion_layers": LAYERS, "head_dim": 12}
    settings = tiny_settings(1, "sum", 0, trunk=trunk, draft_vocab_size=23, norm_eps=1e-3, **OWN)
    drafter = tiny_drafter(TargetAdapter(model), settings)
    with torch.no_grad():
        for name, part in drafter.named_parameters():
            if "norm" in name:
                part.uniform_(0.5, 1.5)
    drafter.draft_ids.copy_(2 * torch.arange(23) + 3)
    folder = _exported(drafter, "eagle3", tmp_path / "exported")
    weights = {
        name: read_checkpoint(folder).tensor(name) for name in read_checkpoint(folder).tensors
    }
    theta = json.loads((folder / "config.json").read_text())["rope_theta"]
    published = PublishedEagle3(weights, model, LAYERS, theta=theta)
    assert_drafts_equal(drafter.double(), published, length=5)
    assert_drafts_equal(imported(folder, model), published, length=5)


BASE = {
    "trunk": WIDE | {"fusion_layers": LAYERS},
    "parallel_levels": 0,
    "num_experts": 1,
    "combine": "sum",
    **OWN,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trunk": FEEDBACK}, "first_position of False"),
        ({"trunk": {"fusion_layers": (2, 3, 6)}}, "fusion_layers from 2 to 5"),
        ({"trunk": {"fusion_layers": (3, 2, 5)}}, "three ascending"),
        ({"trunk": {"mlp_width": 20}}, "mlp_width of null"),
        ({"num_experts": 2}, "num_experts of 1"),
        ({"output_norm": "none"}, "output_norm of head or feedback"),
    ],
)
def test_what_cannot_be_exported_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    trunk = changes.get("trunk")
    arguments = BASE | changes
    arguments["trunk"] = trunk if trunk == FEEDBACK else merge(BASE["trunk"], trunk or {})
    target = TargetAdapter(tiny_llama(num_hidden_layers=6))
    drafter = tiny_drafter(target, tiny_settings(**arguments))
    with pytest.raises(ConfigError, match=message):
        export_eagle3(drafter, "eagle3", FACTS)


def test_what_is_dropped_is_said_and_engines_find_all_keys() -> None:
    target = TargetAdapter(tiny_llama(num_hidden_layers=6))
    drafter = tiny_drafter(target, tiny_settings(**BASE))
    exported = export_eagle3(drafter, "speculators", FACTS)
    assert [part.partition(":")[0] for part in exported.dropped] == [
        "draft trees",
        "the router of the experts",
    ]
    config = exported.config
    assert config["speculators_config"]["verifier"]["name_or_path"] == "owner/target"
    assert config["norm_before_residual"] is False
    assert config["transformer_layer_config"]["max_position_embeddings"] == 128
    own = export_eagle3(drafter, "eagle3", FACTS).config
    assert own["architectures"] == ["LlamaForCausalLMEagle3"]
    assert own["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == list(LAYERS)


TARGET, FOLDER = "/models/the target's", 'exported/my "drafter"'


@pytest.mark.parametrize("layout", ["eagle3", "vllm"])
def test_quotes_and_spaces_in_paths_are_kept(layout: str) -> None:
    schedule = ScheduleSettings(autoregressive_levels=4)
    words = shlex.split(serve_command(layout, FOLDER, TARGET, schedule))
    assert words[:4] == ["vllm", "serve", TARGET, "--speculative-config"]
    options = {"method": "eagle3", "model": FOLDER, "num_speculative_tokens": 4}
    assert json.loads(words[4]) == options
