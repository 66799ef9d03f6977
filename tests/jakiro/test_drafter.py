"""The drafter as a Hugging Face model: saving, strict loading, and no influence of later tokens."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import tiny_family
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.training import one_document
from helpers.variants import BLOCK, VARIANTS
from safetensors.torch import load_file, save_file

from jakiro import JakiroDrafter
from jakiro.config import (
    config_for,
    encoder_arguments,
    experts_arguments,
    state_sources,
    trunk_arguments,
)
from jakiro.errors import CheckpointError, ConfigError
from jakiro.experts import MixtureOfExperts
from jakiro.target.adapter import TargetAdapter
from jakiro.target.cache import TargetState
from jakiro.target.record import record_target
from moa.memory import MemoryEncoder
from moa.trunk import Trunk
from training.loss.drafting import draft_all_positions
from training.module import TargetReader


@pytest.fixture(scope="module")
def target() -> TargetAdapter:
    return TargetAdapter(tiny_llama())


def test_saving_and_loading_keeps_weights_settings_and_outputs(
    target: TargetAdapter, tmp_path: Path
) -> None:
    drafter = tiny_drafter(target)
    drafter.save_pretrained(tmp_path)
    loaded = JakiroDrafter.from_pretrained(tmp_path)
    assert loaded.config.settings == drafter.config.settings
    assert loaded.config.target_record == drafter.config.target_record
    state = TargetState(torch.randn(1, 4, 3, 32), None)
    positions = torch.arange(4)[None]
    for got, expected in zip(
        loaded.encode_memory(state, positions), drafter.encode_memory(state, positions), strict=True
    ):
        torch.testing.assert_close(got, expected)


def _drop_router(weights: dict[str, torch.Tensor]) -> None:
    del weights["experts.router.weight"]


def _add_tensor(weights: dict[str, torch.Tensor]) -> None:
    weights["experts.spare"] = torch.zeros(2)


def _spoil_router(weights: dict[str, torch.Tensor]) -> None:
    weights["experts.router.weight"].view(-1)[0] = float("nan")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_drop_router, r"do not match its config.*experts\.router"),
        (_add_tensor, r"do not match its config.*experts\.spare"),
        (_spoil_router, r"undefined numbers in experts\.router\.weight"),
    ],
)
def test_weights_that_cannot_draft_are_refused(
    damage: Callable[[dict[str, torch.Tensor]], None],
    message: str,
    target: TargetAdapter,
    tmp_path: Path,
) -> None:
    tiny_drafter(target).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    damage(weights)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        JakiroDrafter.from_pretrained(tmp_path)


def test_what_is_no_drafter_is_refused_without_asking_the_hub(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "target")
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "model.gguf").touch()
    for path, message in (
        (tmp_path / "gone", r"no such folder.*`jakiro train`"),
        (tmp_path / "target", r"is a llama model, not a drafter.*generate lookup"),
        (tmp_path / "gguf", "is a GGUF model, not a drafter"),
        ("qwen2.5-coder-1.5b-instruct", "is a GGUF"),
    ):
        with pytest.raises(CheckpointError, match=message):
            JakiroDrafter.from_pretrained(path)


def test_an_unknown_key_in_the_saved_settings_is_refused(
    target: TargetAdapter, tmp_path: Path
) -> None:
    tiny_drafter(target).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["drafter"]["experts"]["num_expert"] = 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"did you mean 'experts\.num_experts'"):
        JakiroDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        ({"layers": (0, 3)}, {}, "from 0 to 2"),
        ({"rotated": False}, {"key_rotation": None}, r"rotates whole keys.*memory\.rotated=true"),
        ({"source": "hidden", "layers": (4,)}, {}, "from 0 to 3"),
        ({"source": "hidden"}, {"num_hidden_states": None}, "of the target cannot be read"),
        (
            BLOCK | {"trunk": {"kind": "block", "block": {"mask_token": 61}}},
            {},
            "mask_token is not a token of the target; expected: an id from 0 to 60",
        ),
    ],
)
def test_what_the_target_does_not_have_is_refused(
    settings: dict[str, Any], changes: dict[str, Any], message: str, target: TargetAdapter
) -> None:
    record = record_target(target.spec, "tiny").model_copy(update=changes)
    with pytest.raises(ConfigError, match=message):
        config_for(tiny_settings(**settings), record)


def test_hidden_states_that_are_read_by_default(target: TargetAdapter) -> None:
    record = record_target(target.spec, "tiny")
    several, last = (
        tiny_settings(source="hidden", layer_attention=layer_attention)
        for layer_attention in (True, False)
    )
    assert state_sources(several, record).memory.layers == (1, 1, 3)
    assert state_sources(last, record).memory.layers == (3,)


def test_a_record_that_lacks_a_fact_of_its_target_is_refused(target: TargetAdapter) -> None:
    config = tiny_drafter(target).config
    del config.target["num_hidden_states"]
    with pytest.raises(ConfigError, match="num_hidden_states"):
        JakiroDrafter(config)


@torch.no_grad()
def test_nothing_beyond_anchor_or_position_reaches_a_prediction(target: TargetAdapter) -> None:
    drafter = tiny_drafter(target)
    count, position, anchor = 10, 6, 3
    anchors = (torch.arange(count) - (position - anchor)).clamp(min=0)
    batch = one_document(torch.randint(0, 61, (1, count)), anchors)
    view = TargetReader(target, drafter, count, torch.float32).view(batch)
    before = next(iter(draft_all_positions(drafter, view, batch))).features[0, position]

    later_memory = view.state.memory.clone()
    later_memory[:, anchor + 1 :] += 1.0
    later_tokens = view.embeddings.clone()
    later_tokens[:, position + 1 :] += 1.0
    blind = view._replace(state=TargetState(later_memory, None), embeddings=later_tokens)
    after = next(iter(draft_all_positions(drafter, blind, batch))).features[0, position]
    torch.testing.assert_close(after, before, atol=0, rtol=0)

    seen = view.state.memory.clone()
    seen[:, anchor] += 1.0
    changed = view._replace(state=TargetState(seen, None))
    other = next(iter(draft_all_positions(drafter, changed, batch))).features[0, position]
    assert not torch.allclose(other, before)


@torch.no_grad()
def test_layers_of_unequal_width_are_projected_to_a_common_width() -> None:
    target = TargetAdapter(tiny_family("gemma4, heads of two widths"))
    record = record_target(target.spec, "tiny")
    assert len(set(record.kv_widths)) == 2
    with pytest.raises(ConfigError, match="differ in the width"):
        config_for(tiny_settings(), record)
    drafter = tiny_drafter(target, tiny_settings(common_width=12))
    reader = TargetReader(target, drafter, 8, torch.float32)
    tokens = torch.randint(0, target.spec.vocab_size, (1, 8))
    view = reader.view(one_document(tokens, torch.arange(8) - 1))
    narrow = min(range(len(record.kv_widths)), key=record.kv_widths.__getitem__)
    state = view.state.memory
    assert state is not None
    assert state.shape[2:] == (len(record.kv_widths), max(record.kv_widths))
    assert state[:, :, narrow, min(record.kv_widths) :].eq(0).all()
    assert state[:, :, narrow, : min(record.kv_widths)].ne(0).all()


def test_a_single_fused_state_is_projected_and_the_last_state_alone_is_not(
    target: TargetAdapter,
) -> None:
    fused = tiny_drafter(target, tiny_settings(trunk={"kind": "feedback", "fusion_layers": (1,)}))
    unfused = tiny_drafter(target, tiny_settings(trunk={"kind": "feedback"}))
    assert isinstance(fused.feature_encoder.output, torch.nn.Linear)
    assert isinstance(unfused.feature_encoder.output, torch.nn.Identity)


@pytest.mark.parametrize("name", ["E2-sum-P1", "feedback-fused", "eagle3.1", "hybrid-long-context"])
def test_modules_built_from_a_config_take_the_weights_of_the_drafter(name: str) -> None:
    target = TargetAdapter(tiny_llama(num_hidden_layers=3))
    drafter = tiny_drafter(target, VARIANTS[name])
    memory, features = encoder_arguments(drafter.config)
    built = {
        "trunk": Trunk(**trunk_arguments(drafter.config)),
        "experts": MixtureOfExperts(**experts_arguments(drafter.config)),
        "memory_encoder": None if memory is None else MemoryEncoder(**memory),
        "feature_encoder": None if features is None else MemoryEncoder(**features),
    }
    for part, module in built.items():
        own = getattr(drafter, part)
        assert (module is None) is (own is None)
        if module is not None:
            module.load_state_dict(own.state_dict())
