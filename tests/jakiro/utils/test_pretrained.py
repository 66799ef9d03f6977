"""Missing, damaged and foreign models are refused in one line, and models are described."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import tiny_llama
from helpers.tokenizers import tiny_tokenizer
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config

from jakiro.errors import CheckpointError
from jakiro.utils.pretrained import (
    describe_model,
    is_hub_reachable,
    load_causal_lm,
    load_config,
    load_tokenizer,
    local_tokenizer,
)


@pytest.mark.parametrize("load", [load_causal_lm, load_tokenizer, load_config])
def test_every_loader_refuses_missing_folders(load: object, tmp_path: Path) -> None:
    assert callable(load)
    with pytest.raises(CheckpointError, match="no such folder"):
        load(tmp_path / "gone")
    Qwen2Config(hidden_size=8, num_hidden_layers=1, vocab_size=9).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="without a tokenizer"):
        load_tokenizer(tmp_path)
    assert local_tokenizer(tmp_path) is None


def test_a_model_is_described_by_its_folder_dtype_and_size(tmp_path: Path) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path / "my-model")
    count = f"{model.num_parameters() / 1000:.1f}k"
    described = describe_model(load_causal_lm(tmp_path / "my-model", dtype="bfloat16"))
    assert described == f"my-model, bfloat16, {count} parameters"
    model.name_or_path = "owner/model"
    assert describe_model(model) == f"owner/model, float32, {count} parameters"


def _changed(folder: Path, name: str, **values: object) -> None:
    """Change values in a JSON file of a model's folder."""
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The folder of a tiny model with three layers and a tokenizer."""
    folder = tmp_path / "model"
    tiny_llama(num_hidden_layers=3).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("count", "kind"), [(5, "missing"), (2, "superfluous")])
def test_weights_of_another_number_of_layers_are_refused(
    saved: Path, count: int, kind: str
) -> None:
    _changed(saved, "config.json", num_hidden_layers=count, layer_types=["full_attention"] * count)
    with pytest.raises(CheckpointError, match=rf"\d+ {kind} weights, such as model\.layers\."):
        load_causal_lm(saved)


def test_weights_of_another_part_do_no_harm(saved: Path) -> None:
    file = saved / "model.safetensors"
    image = {"vision.patches.weight": torch.ones(2)}
    save_file(load_file(file) | image, file, metadata={"format": "pt"})
    assert load_causal_lm(saved).config.num_hidden_layers == 3


def test_code_in_a_folder_is_not_run(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (saved / "code.py").write_text("raise SystemExit('this code was run')")
    names = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    _changed(saved, "config.json", model_type="unknown", auto_map=names)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    for load in (load_causal_lm, load_config):
        with pytest.raises(CheckpointError, match="contains custom code"):
            load(saved)


def _cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def _pickled_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"not a pickle")


def _another_width(folder: Path) -> None:
    _changed(folder, "config.json", intermediate_size=7)


@pytest.mark.parametrize("damage", [_cut_weights, _pickled_weights, _another_width])
def test_damaged_models_are_refused_in_one_line(saved: Path, damage: Any) -> None:
    damage(saved)
    with pytest.raises(CheckpointError, match="cannot load the target") as caught:
        load_causal_lm(saved)
    assert "\n" not in str(caught.value)


def test_a_hub_that_cannot_be_reached_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def unknown(host: object, *_: object) -> None:
        asked.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    is_hub_reachable.cache_clear()
    for load in (load_causal_lm, load_config, load_tokenizer):
        with pytest.raises(CheckpointError, match=r"no such folder.*no connection to the hub"):
            load("nobody/nothing")
    assert len(asked) <= 2  # once here, and once by the library for its description of the caller
    is_hub_reachable.cache_clear()


def test_adapters_have_the_tokenizer_of_their_model(saved: Path, tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(saved)
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    base = {"base_model_name_or_path": str(saved)}
    (adapters / "adapter_config.json").write_text(json.dumps(base))
    for tokenizer in (load_tokenizer(adapters), local_tokenizer(adapters)):
        assert tokenizer is not None
        assert tokenizer.get_vocab() == tiny_tokenizer().get_vocab()
