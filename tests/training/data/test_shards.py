"""Parquet shards contain the records of a JSONL file; those that name persons can be left out."""

import errno
import json
import os
from contextlib import suppress
from pathlib import Path

import pytest

from jakiro.cli import app
from jakiro.errors import ConfigError, DataError
from training.data.shards import common_words, names_person, write_shards
from training.data.sources import find_sources

RECORDS = [
    {"record": 1, "messages": [{"role": "user", "content": "why is it so?"}]},
    {
        "record": 2,
        "messages": [
            {"role": "user", "content": "who was it?"},
            {"role": "assistant", "content": "It was Ada Lovelace.", "is_cut": True},
        ],
    },
    {"record": 4, "messages": [{"role": "user", "content": "and how?"}]},
]
COMMON = common_words(
    [
        "the machine is learning and new deep models are read by the dear state department",
        "however the great writer wrote about the solar system in the morning",
    ]
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return path


def _read(folder: Path) -> list[dict[str, object]]:
    return [record.fields for source in find_sources([str(folder)]) for record in source.records()]


def _without_nulls(record: dict[str, object]) -> dict[str, object]:
    def clean(message: dict[str, object]) -> dict[str, object]:
        return {key: value for key, value in message.items() if value is not None}

    return record | {"messages": [clean(message) for message in record["messages"]]}  # type: ignore[attr-defined]


def test_training_reads_the_same_records_from_shards(source: Path, tmp_path: Path) -> None:
    assert write_shards(source, tmp_path / "shards", records_per_shard=2) == (3, 3)
    assert len(list((tmp_path / "shards").iterdir())) == 2
    assert [_without_nulls(record) for record in _read(tmp_path / "shards")] == RECORDS


def test_keys_that_the_first_record_lacks_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    records = [{"text": "one"}, {"text": "two", "is_cut": True}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    write_shards(path, tmp_path / "shards")
    assert [record.get("is_cut") for record in _read(tmp_path / "shards")] == [None, True]


def test_records_of_mixed_types_are_an_error_and_leave_nothing(tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    path.write_text('{"text": "one"}\n{"text": {"two": 2}}\n')
    with pytest.raises(DataError, match="always has values of the same type"):
        write_shards(path, tmp_path / "shards")
    assert not list((tmp_path / "shards").iterdir())


def test_calls_with_different_arguments_are_an_error(tmp_path: Path) -> None:
    def record(arguments: dict[str, str]) -> str:
        call = {"type": "function", "function": {"name": "find", "arguments": arguments}}
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}]
        return json.dumps({"messages": turns}) + "\n"

    source = tmp_path / "calls.jsonl"
    source.write_text(record({"city": "Rome"}) + record({"query": "x"}))
    with pytest.raises(DataError, match="objects with different keys"):
        write_shards(source, tmp_path / "shards")
    source.write_text(record({"city": 1}) + record({"city": 2.5}))  # type: ignore[dict-item]
    with pytest.raises(DataError, match="objects with different keys"):
        write_shards(source, tmp_path / "shards")
    source.write_text(record({"city": "Rome"}) + record({"city": "Oslo"}))
    write_shards(source, tmp_path / "shards")


def test_records_that_name_persons_are_left_out(source: Path, tmp_path: Path) -> None:
    assert write_shards(source, tmp_path / "shards", leave_out_persons=True) == (3, 2)
    assert [record["record"] for record in _read(tmp_path / "shards")] == [1, 4]


def test_shards_are_not_overwritten(source: Path, tmp_path: Path) -> None:
    write_shards(source, tmp_path / "shards")
    with pytest.raises(ConfigError, match="contains files"):
        write_shards(source, tmp_path / "shards")


@pytest.mark.parametrize("num_before", [0, 1])
def test_an_interruption_leaves_all_records_or_none(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_before: int
) -> None:
    rename, renamed = Path.rename, []

    def interrupt(path: Path, target: Path) -> Path:
        renamed.append(path)
        if len(renamed) > num_before:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
        patched.setattr(Path, "rename", interrupt)
        write_shards(source, tmp_path / "shards", records_per_shard=1)
    assert len(list((tmp_path / "shards").iterdir())) in (0, len(RECORDS))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chats.jsonl", "shards"]


@pytest.mark.parametrize(
    ("owner", "name", "answer", "got"),
    [
        (Path, "is_mount", True, "got: a mount point"),
        (os, "access", False, "got: no permission to write into "),
    ],
)
def test_a_folder_that_cannot_be_replaced_is_an_error_before_anything_is_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: object,
    name: str,
    answer: bool,
    got: str,
) -> None:
    monkeypatch.setattr(owner, name, lambda *_: answer)
    with pytest.raises(ConfigError, match=f"{got}.*choose a new folder in it"):
        write_shards(tmp_path / "missing.jsonl", tmp_path / "shards")
    assert not list((tmp_path / "shards").iterdir())


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.ENOSPC, "free disk space"), (errno.EBUSY, "choose a new folder in it")],
)
def test_a_remedy_fits_the_reason_why_nothing_was_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    def refuse(path: Path, target: Path) -> Path:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(DataError, match=remedy):
        write_shards(source, tmp_path / "shards")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chats.jsonl", "shards"]


def test_the_folder_may_be_a_link(source: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "shards").symlink_to(tmp_path / "disk")
    write_shards(source, tmp_path / "shards")
    assert len(_read(tmp_path / "disk")) == len(RECORDS)


def test_an_empty_result_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(RECORDS[1]) + "\n")
    with pytest.raises(DataError, match="nothing to write"):
        write_shards(path, tmp_path / "shards", leave_out_persons=True)


def test_the_command_says_how_many_records_it_wrote(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "shards"
    app(
        ["data", "shards", str(source), "--out", str(out), "--leave-out-persons"],
        standalone_mode=False,
    )
    assert f"2 of 3 records in {out}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "It was Ada Lovelace who wrote it.",
        "The painter Vincent van Gogh was Dutch.",
        "Ask Dr. Miller about it.",
        "The books of J. K. Rowling are long.",
        "Emily Brontë wrote one novel.",
        "Jean-Luc Picard gave the order.",
        "Émile Zola and LeBron James never met.",
        "Ask Conor O'Brien.",
    ],
)
def test_persons_are_found(text: str) -> None:
    assert names_person(text, COMMON)


@pytest.mark.parametrize(
    "text",
    [
        "Machine Learning and Deep Learning are related.",
        "However, the Great Writer is unknown.",
        "In Paris, it rains. Berlin is dry.",
        "- Solar System\n- State Department",
        "HTML and CSS",
    ],
)
def test_other_texts_are_kept(text: str) -> None:
    assert not names_person(text, COMMON)


def test_a_word_that_is_almost_always_capitalized_is_not_common() -> None:
    assert common_words(["Anna likes anna.", "Anna " * 20]) >= {"likes"}
    assert "anna" not in common_words(["Anna likes anna.", "Anna " * 20])
