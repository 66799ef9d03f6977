"""The file of generated records survives interruptions at any time, and has one writer."""

import json
from pathlib import Path

import pytest

from jakiro.errors import ConfigError
from training.data.regeneration.output_file import OutputFile


def _records(path: Path, limit: int) -> list[str]:
    """Return the earlier records that a raised limit leaves to be written again."""
    output = OutputFile(path)
    with output.claim({"limit": limit}, "limit"):
        return [record["text"] for record in output.earlier()]


def _written(path: Path, limit: int, text: str) -> OutputFile:
    output = OutputFile(path)
    with output.claim({"limit": limit}, "limit"):
        output.append([{"record": 1, "text": text}])
    return output


def test_an_interruption_while_earlier_records_are_deleted_does_not_keep_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.jsonl"
    _written(path, 1, "first")
    output = _written(path, 2, "second")

    def interrupt(_path: Path, missing_ok: bool = False) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", interrupt)
        with pytest.raises(KeyboardInterrupt):
            output.forget_earlier()
    assert _records(path, 2) == []
    assert _records(path, 3) == ["second"]
    assert not path.exists()  # the records are written again


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_raised_limit_can_be_changed_or_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_interrupted: bool
) -> None:
    path = tmp_path / "out.jsonl"
    _written(path, 2, "first")
    assert _records(path, 9) == ["first"]  # no record fits
    with pytest.raises(ConfigError, match="limit differs"):
        _records(path, 1)
    assert _records(path, 4) == ["first"]
    assert not path.exists()  # the records are written again
    if is_interrupted:
        with monkeypatch.context() as patched:
            patched.setattr(OutputFile, "_store", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                _records(path, 2)
    assert _records(path, 2) == []
    assert json.loads(path.read_text())["text"] == "first"
    assert not path.with_name("out.jsonl.earlier").exists()
    _written(path, 4, "second")
    for limit in (2, 3, 5):  # records are not lost silently
        with pytest.raises(ConfigError, match="limit differs"):
            _records(path, limit)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_the_file_of_a_lock_stays_so_that_all_processes_lock_the_same_file(tmp_path: Path) -> None:
    path, lock = tmp_path / "out.jsonl", tmp_path / ".out.jsonl.lock"
    _written(path, 1, "first")
    before = lock.stat().st_ino
    output = OutputFile(path)
    with output.claim({"limit": 1}):
        assert lock.stat().st_ino == before
        with pytest.raises(ConfigError, match="another process"), OutputFile(path).claim({}):
            pass
    assert json.loads(path.read_text())["text"] == "first"
