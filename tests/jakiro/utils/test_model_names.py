"""Names of models and drafters that certainly do not exist are refused, and no others."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from jakiro.errors import CheckpointError, ConfigError, JakiroError
from jakiro.utils import fetch, hub
from jakiro.utils.model_names import refuse_missing_drafter, refuse_missing_model, similar_model


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with empty caches and a hub that may be within reach; returns the hub's cache."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "is_hub_reachable", lambda: True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(fetch, "user_cache_path", lambda _name: tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nope", "nothing exists.*check the path"),
        ("smolm2-135m-instruct", r"use smollm2-135m-instruct, which `jakiro fetch` downloads"),
        ("smollm2-135m-instruct", "has not been fetched.*jakiro fetch smollm2-135m-instruct"),
        ("nope.gguf", "there is no file nope.gguf"),
    ],
)
def test_a_name_of_nothing_is_refused(name: str, message: str) -> None:
    with pytest.raises(JakiroError, match=message):
        refuse_missing_model(name)


def test_a_name_that_may_be_on_the_hub_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "smolm2-135m-instruct").mkdir()
    for name in ("gpt2", "owner/smollm2-135m-instruct", "smolm2-135m-instruct", tmp_path):
        refuse_missing_model(name)
    for name in ("owner/name", "smollm2-135m-instruct", str(tmp_path)):
        refuse_missing_drafter(name)


@pytest.mark.parametrize(
    ("offline", "reason"), [(True, "HF_HUB_OFFLINE is set"), (False, "no connection to https")]
)
def test_without_the_hub_only_its_cache_is_left(
    offline: bool, reason: str, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(hub, "is_hub_reachable", lambda: offline)
    for refuse in (refuse_missing_model, refuse_missing_drafter):
        with pytest.raises(CheckpointError, match=reason):
            refuse("owner/name")
    (machine / "models--owner--name").mkdir(parents=True)
    for refuse in (refuse_missing_model, refuse_missing_drafter):
        refuse("owner/name")


def test_a_folder_with_several_gguf_files_is_refused(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"several models.*a\.gguf, b\.gguf"):
        refuse_missing_model(tmp_path)


def test_only_similar_names_are_proposed() -> None:
    assert similar_model("smollm2-135m") == "smollm2-135m-instruct"
    assert similar_model("gpt2") is None
