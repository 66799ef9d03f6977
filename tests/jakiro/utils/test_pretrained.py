"""Paths of missing folders are refused before the hub is asked, and models are described."""

from pathlib import Path

import pytest
from helpers.models import tiny_llama

from jakiro.errors import CheckpointError
from jakiro.utils.pretrained import (
    describe_model,
    load_causal_lm,
    load_config,
    load_tokenizer,
    local_tokenizer,
    refuse_missing_folder,
)


@pytest.mark.parametrize("name", ["/nope", "./nope", "../nope/a", "~/nope", "a/b/c", "runs/nope"])
def test_a_path_of_a_missing_folder_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"a path at which nothing exists.*try again"):
        refuse_missing_folder(name, "the target", "try again")


@pytest.mark.parametrize("name", ["gpt2", "meta-llama/Llama-3.1-8B", "runs", "runs/there"])
def test_hub_ids_and_folders_are_not_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs" / "there").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    refuse_missing_folder(name, "the target", "try again")


@pytest.mark.parametrize("load", [load_causal_lm, load_tokenizer, load_config])
def test_every_loader_refuses_missing_folders(load: object, tmp_path: Path) -> None:
    assert callable(load)
    with pytest.raises(CheckpointError, match="a path at which nothing exists"):
        load(tmp_path / "gone")
    assert local_tokenizer(tmp_path / "gone") is None


def test_a_model_is_described_by_its_folder_dtype_and_size(tmp_path: Path) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path / "my-model")
    count = f"{model.num_parameters() / 1000:.1f}k"
    described = describe_model(load_causal_lm(tmp_path / "my-model", dtype="bfloat16"))
    assert described == f"my-model, bfloat16, {count} parameters"
    model.name_or_path = "owner/model"
    assert describe_model(model) == f"owner/model, float32, {count} parameters"
