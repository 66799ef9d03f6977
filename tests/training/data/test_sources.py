"""Supported files are read; errors name the unusable file and the line of the fault."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from helpers.training import write_jsonl

from jakiro.errors import DataError
from training.data.sources import Intake, Source, find_sources, read_all

RECORDS = [{"text": "one"}, {"text": "two"}]


def read(*paths: Path) -> list[tuple[dict, str]]:
    sources = find_sources([str(path) for path in paths])
    return [record[:2] for source in sources for record in source.records()]


def test_json_jsonl_and_parquet_files_hold_the_same_records(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", RECORDS)
    (tmp_path / "b.json").write_text(json.dumps(RECORDS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), tmp_path / "c.parquet")
    for path in sorted(tmp_path.iterdir()):
        assert read(path) == [(fields, f"{path}:{n}") for n, fields in enumerate(RECORDS, start=1)]


def test_a_folder_stands_for_its_data_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    write_jsonl(tmp_path / "below" / "b.jsonl", RECORDS[1:])
    write_jsonl(tmp_path / "a.jsonl", RECORDS[:1])
    (tmp_path / "notes.txt").write_text("no data")
    assert [fields for fields, _ in read(tmp_path)] == RECORDS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "\n", r"no records in .*a\.jsonl"),
        ("a.jsonl", "[1]", r"a\.jsonl:1 is not an object"),
        ("a.jsonl", '{"text": "one"}\n{"text": "cut', r"a\.jsonl:2 is not JSON"),
        ("a.json", '{"text": "one"}', r"remedy: rename the file to end in \.jsonl"),
        ("a.parquet", "no parquet", r"cannot read .*a\.parquet"),
        ("a.txt", "one", "is of an unknown kind"),
    ],
)
def test_an_unusable_file_or_line_is_named(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        list(read_all(find_sources([str(tmp_path / name)]), Intake()))


@pytest.mark.parametrize(
    "name",
    [
        *("missing.jsonl", "./missing", "chats.txt", "docs/nope:train", "a/b/c"),
    ],
)
def test_a_missing_file_is_not_taken_for_a_data_set_of_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="there is no file or folder"):
        find_sources([name])


def test_a_data_set_by_name_is_read_through_the_datasets_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "train.jsonl", RECORDS)
    source, name = Source(str(tmp_path / "set"), "train"), str(tmp_path / "set")
    records = [*source.records()]
    assert records == [(fields, f"{name}:{n}", n, 0) for n, fields in enumerate(RECORDS, start=1)]
    assert source.fingerprint() == source.fingerprint() != ""
    with pytest.raises(DataError, match="cannot load the dataset"):
        list(Source(name, "no such split").records())
