"""`jakiro prepare` and `jakiro regenerate`: what they say, and what training finds afterwards."""

import json
import re
from pathlib import Path

import pytest
from helpers.models import tiny_llama
from helpers.tokenizers import tiny_tokenizer
from helpers.training import CHAT_TEMPLATE, TEXTS, write_jsonl

from jakiro.cli import main
from training.data import token_store
from training.data.token_store import open_tokens

CHAT = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A target, and data with two rows that cannot be used."""
    tokenizer = tiny_tokenizer(CHAT_TEMPLATE)
    model = tiny_llama(vocab=len(tokenizer), eos_token_id=0, max_position_embeddings=256)
    model.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    rows = [{"messages": CHAT}, {"no": 1}, {"text": TEXTS[0]}, {"messages": CHAT[:1]}]
    write_jsonl(tmp_path / "data.jsonl", rows)
    return tmp_path


def run(folder: Path, command: str, *words: str) -> int:
    options = ["--target", str(folder / "target"), "--data", str(folder / "data.jsonl")]
    with pytest.raises(SystemExit) as exit_info:
        main([command, *options, *words])
    return int(exit_info.value.code or 0)


def test_prepare_fills_the_cache_that_training_reads(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--cache-folder", str(folder / "cache"), "--skip-bad-rows", "--sequence-length", "64"]
    assert run(folder, "prepare", *words) == 0
    said = capsys.readouterr().out
    assert "4 records read, 2 skipped; 2 documents" in said
    packed = r"2 documents packed into \d sequences with [\d.]+% padding; 1 were split"
    assert re.search(packed, said)
    monkeypatch.delattr(token_store, "encode_records")
    store = open_tokens(
        [str(folder / "data.jsonl")],
        tiny_tokenizer(CHAT_TEMPLATE),
        folder / "cache",
        skip_bad_rows=True,
        vocab_size=300,
    )
    assert store.num_documents == 2


@pytest.mark.parametrize(
    ("split", "advised"),
    [("texts", "--split all, or another --sequence-length"), ("all", "another --")],
)
def test_prepare_names_its_own_options_where_there_is_much_padding(
    folder: Path, split: str, advised: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--cache-folder", str(folder / "cache"), "--skip-bad-rows", "--split", split]
    assert run(folder, "prepare", *words) == 0
    assert f"of all packed tokens are padding: {advised}" in capsys.readouterr().out


def test_a_preview_shows_responses_apart(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--cache-folder", str(folder / "cache"), "--skip-bad-rows", "--preview", "5"]
    assert run(folder, "prepare", *words) == 0
    said = capsys.readouterr().out
    assert f"document 1 of 2, {folder / 'data.jsonl'}:1: " in said.replace("\n", "")
    assert "<user>Why?</s><assistant>⟦Because.</s>⟧" in said
    assert "⟦def add_one" in said


@pytest.mark.parametrize("command", ["prepare", "regenerate"])
def test_an_unusable_row_is_one_line_with_its_place(
    folder: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = {"prepare": "--cache-folder", "regenerate": "--out"}[command]
    words = [place, str(folder / "new.jsonl")]
    words += ["--max-new-tokens", "8"] if command == "regenerate" else []
    assert run(folder, command, *words) == 2
    said = capsys.readouterr().err
    assert "data.jsonl:2 is neither a text nor a conversation" in said
    assert len(said.strip().splitlines()) == 1


def test_regenerate_writes_rows_that_prepare_reads(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "own.jsonl"
    words = ["--out", str(out), "--max-new-tokens", "8", "--skip-bad-rows", "--seed", "4"]
    assert run(folder, "regenerate", *words) == 0
    said = capsys.readouterr().out
    assert f"2 rows in {out}, 2 of them new" in said
    assert "2 unusable rows left out" in said
    assert [json.loads(line)["row"] for line in out.read_text().splitlines()] == [1, 3]
    assert run(folder, "regenerate", *words) == 0
    assert "0 of them new" in capsys.readouterr().out
    out.replace(folder / "data.jsonl")
    assert run(folder, "prepare", "--cache-folder", str(folder / "cache")) == 0
    assert "2 records read, 0 skipped" in capsys.readouterr().out


@pytest.mark.parametrize("drafter", ["lookup", "aded", "lm={}/target", "aded+lm={}/target"])
def test_drafters_that_need_no_training_answer_like_the_target_alone(
    folder: Path, drafter: str
) -> None:
    words = ["--max-new-tokens", "8", "--skip-bad-rows"]
    assert run(folder, "regenerate", "--out", str(folder / "plain.jsonl"), *words) == 0
    words += ["--drafter", drafter.format(folder)]
    assert run(folder, "regenerate", "--out", str(folder / "fast.jsonl"), *words) == 0
    assert (folder / "plain.jsonl").read_bytes() == (folder / "fast.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--temperature", "-1"], "unusable value for 'temperature'"),
        (["--max-new-tokens", "256"], "leaves no room for a question"),
        (["--drafter", "nowhere/at all"], "cannot load"),
    ],
)
def test_what_cannot_be_done_is_refused(
    folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "regenerate", "--out", str(folder / "o.jsonl"), *words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "out", ["data.jsonl", "more/own.jsonl", "more/deep/own.jsonl", "link.jsonl"]
)
def test_rows_are_not_written_where_they_are_read_and_nothing_is_loaded_before_that_is_said(
    tmp_path: Path, out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "data.jsonl", [{"messages": CHAT}])
    (tmp_path / "more").mkdir()
    write_jsonl(tmp_path / "more" / "rows.jsonl", [{"messages": CHAT}])
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "data.jsonl")
    before = sorted(tmp_path.rglob("*"))
    words = ["--data", str(tmp_path / "more"), "--out", str(tmp_path / out)]
    assert run(tmp_path, "regenerate", *words) == 2
    assert "would be part of the data that it is made from" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
