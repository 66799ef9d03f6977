"""`jakiro regenerate`: its output, and the data that training then reads."""

import json
import os
from pathlib import Path

import pytest
from helpers.records import CHAT, run_on_records, write_target_and_records
from helpers.training import write_jsonl

from jakiro.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a target, and with data that has two unusable records."""
    return write_target_and_records(tmp_path)


@pytest.mark.parametrize("command", ["prepare", "regenerate"])
def test_an_unusable_record_is_one_line_with_its_location(
    folder: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    option = {"prepare": "--cache-folder", "regenerate": "--out"}[command]
    words = [option, str(folder / "new.jsonl")]
    words += ["--max-new-tokens", "8"] if command == "regenerate" else []
    assert run_on_records(folder, command, *words) == 2
    printed = capsys.readouterr().err
    assert "data.jsonl:2 is neither a text nor a conversation" in printed
    lines = [line for line in printed.splitlines() if "INFO" not in line]  # about measurements
    assert len(lines) == 1


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
    assert run_on_records(folder, "prepare", "--cache-folder", str(folder / "cache")) == 0
    assert "2 records read, 0 skipped" in capsys.readouterr().out


def test_a_finished_file_is_recognized_before_the_target_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise CheckpointError("the target is loaded")

    out = folder / "own.jsonl"
    words = ["--out", str(out), "--max-new-tokens", "8", "--skip-bad-records"]
    assert run_on_records(folder, "regenerate", *words) == 0
    written = out.read_bytes()
    out.write_bytes(written.splitlines(keepends=True)[0])  # the last record is lost
    assert run_on_records(folder, "regenerate", *words) == 0
    assert out.read_bytes() == written
    with monkeypatch.context() as patch:
        patch.setattr("inference.benchmark.subject.load_target", fail)
        capsys.readouterr()
        assert run_on_records(folder, "regenerate", *words) == 0
        assert capsys.readouterr().out == f"2 records in {out}, 0 of them new\n"
        for changed in (["--max-new-tokens", "9"], ["--dtype", "bfloat16"]):
            assert run_on_records(folder, "regenerate", *words, *changed) == 2
        os.utime(folder / "target" / "model.safetensors", ns=(1, 1))
        assert run_on_records(folder, "regenerate", *words) == 2
        assert "the target is loaded" in capsys.readouterr().err


def test_a_conversation_for_a_target_without_a_chat_template_is_refused_before_any_measurement(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a decoder measures the machine")

    monkeypatch.setattr("inference.SpeculativeDecoder", fail)
    (folder / "target" / "chat_template.jinja").unlink()
    assert run_on_records(folder, "regenerate", "--out", str(folder / "own.jsonl")) == 2
    assert "data.jsonl:1 is a conversation, but the tokenizer has no" in capsys.readouterr().err


@pytest.mark.parametrize("drafter", ["lookup", "aded", "lm={}/target", "aded+lm={}/target"])
def test_drafters_that_need_no_training_answer_like_the_target_alone(
    folder: Path, drafter: str
) -> None:
    words = ["--max-new-tokens", "8", "--skip-bad-records"]
    assert run_on_records(folder, "regenerate", "--out", str(folder / "target.jsonl"), *words) == 0
    words += ["--drafter", drafter.format(folder)]
    assert run_on_records(folder, "regenerate", "--out", str(folder / "fast.jsonl"), *words) == 0
    assert (folder / "target.jsonl").read_bytes() == (folder / "fast.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--temperature", "-1"], "unusable value for '--temperature'"),
        (["--max-new-tokens", "256"], "leaves no room for a question"),
        (["--drafter", "nowhere/at all"], "cannot load"),
    ],
)
def test_impossible_requests_are_refused(
    folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_on_records(folder, "regenerate", "--out", str(folder / "o.jsonl"), *words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "out", ["data.jsonl", "more/own.jsonl", "more/deep/own.jsonl", "link.jsonl"]
)
def test_records_are_not_written_into_their_source_and_nothing_is_loaded_before_the_refusal(
    tmp_path: Path, out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "data.jsonl", [{"messages": CHAT}])
    for name in ("more", "target"):
        (tmp_path / name).mkdir()
    write_jsonl(tmp_path / "more" / "rows.jsonl", [{"messages": CHAT}])
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "data.jsonl")
    before = sorted(tmp_path.rglob("*"))
    words = ["--data", str(tmp_path / "more"), "--out", str(tmp_path / out)]
    assert run_on_records(tmp_path, "regenerate", *words) == 2
    assert "would be part of the data that it is made from" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
