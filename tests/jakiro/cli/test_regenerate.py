"""`jakiro regenerate`: its output, and the data that training then reads."""

import json
from pathlib import Path

import pytest
from helpers.records import run_on_records, write_target_and_records


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a target, and with data that has two unusable records."""
    return write_target_and_records(tmp_path)


def test_regenerate_writes_records_that_prepare_reads(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "own.jsonl"
    words = ["--out", str(out), "--max-new-tokens", "8", "--skip-bad-records", "--seed", "4"]
    assert run_on_records(folder, "regenerate", *words) == 0
    printed = capsys.readouterr().out
    assert f"2 records in {out}, 2 of them new" in printed
    assert "2 unusable records left out" in printed
    assert [json.loads(line)["record"] for line in out.read_text().splitlines()] == [1, 3]
    assert run_on_records(folder, "regenerate", *words) == 0
    assert "0 of them new" in capsys.readouterr().out
    out.replace(folder / "data.jsonl")
    assert run_on_records(folder, "prepare data", "--cache-folder", str(folder / "cache")) == 0
    assert "2 records read, 0 skipped" in capsys.readouterr().out


@pytest.mark.parametrize("drafter", ["lookup", "aded", "lm={}/target", "aded+lm={}/target"])
def test_drafters_that_need_no_training_answer_like_the_target_alone(
    folder: Path, drafter: str
) -> None:
    words = ["--max-new-tokens", "8", "--skip-bad-records"]
    assert run_on_records(folder, "regenerate", "--out", str(folder / "target.jsonl"), *words) == 0
    words += ["--drafter", drafter.format(folder)]
    assert run_on_records(folder, "regenerate", "--out", str(folder / "fast.jsonl"), *words) == 0
    assert (folder / "target.jsonl").read_bytes() == (folder / "fast.jsonl").read_bytes()
