"""`jakiro prepare`, `regenerate` and `synthesize` write what training and decoding read."""

import json
import re
import shlex
from pathlib import Path

import pytest
from helpers.commands import exit_code
from helpers.models import tiny_llama
from helpers.records import run_on_records, write_target_and_records
from helpers.target_states import offline_run
from helpers.templates import CHATML
from helpers.tokenizers import TEXT, tiny_tokenizer
from helpers.training import CHAT_TEMPLATE, TEXTS, tiny_run, write_jsonl

from inference import SpeculativeDecoder
from inference.drafters.aded.table import load_trigrams
from jakiro.utils.settings import dump_settings
from training.data import token_store
from training.data.token_store import open_tokens
from training.train import train


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a target, and with data that has two unusable records."""
    return write_target_and_records(tmp_path)


def test_prepare_fills_the_cache_that_training_reads(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--cache-folder", str(folder / "cache"), "--sequence-length", "64"]
    assert run_on_records(folder, "prepare data", "--skip-bad-records", *words) == 0
    printed = capsys.readouterr().out
    assert "4 records read, 2 skipped; 2 documents" in printed
    packed = r"2 documents packed into \d sequences with [\d.]+% padding; 1 document split"
    assert re.search(packed, printed)
    monkeypatch.delattr(token_store, "encode_records")
    store = open_tokens(
        [str(folder / "data.jsonl")],
        tiny_tokenizer(CHAT_TEMPLATE),
        folder / "cache",
        skip_bad_records=True,
        vocab_size=300,
    )
    assert store.num_documents == 2


def test_a_run_is_trained_from_written_states_whose_damaged_shards_are_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_llama(vocab=300, eos_token_id=0).save_pretrained(tmp_path / "target")
    tiny_tokenizer(texts=TEXTS).save_pretrained(tmp_path / "target")
    write_jsonl(tmp_path / "texts.jsonl", ({"text": text} for text in TEXTS))
    (tmp_path / "run.yaml").write_text(dump_settings(tiny_run(tmp_path)))
    words = ["prepare", "states", "--config", tmp_path / "run.yaml"]
    words += ["--out", tmp_path / "features", "--set", "target_states.dtype=fp32"]
    assert exit_code(*words) == 0
    size, end = capsys.readouterr().out.splitlines()
    assert " tokens x 512 bytes = " in size
    assert "in 1 shard, " in size
    assert end == f"all target states are in {tmp_path / 'features'}"
    train(offline_run(tmp_path, steps=2, evaluation={"num_prompts": 0}))
    (shard,) = (tmp_path / "features").glob("*.safetensors")
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    assert exit_code(*words) == 0
    assert shard.read_bytes() == content


def test_a_corpus_becomes_a_table_that_decoding_starts_with(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "corpus").mkdir()
    write_jsonl(folder / "corpus" / "a.jsonl", [{"text": TEXT}, {"text": TEXT * 2}])
    words = ["--corpus", folder / "corpus", "--tokenizer", folder / "target"]
    table = folder / "table"
    assert exit_code("prepare", "trigrams", *words, "--out", table) == 0
    stored, use = capsys.readouterr().err.splitlines()[-2:]
    assert "; stored those of " in stored
    next_words = shlex.split(use.removeprefix("use them with: jakiro "))
    assert next_words == ["generate", f"aded={table}", "PROMPT", "--target", "TARGET"]
    target = ["--target", folder / "target", "--max-new-tokens", "6"]
    texts = []
    small = f"lm={folder / 'target'}"
    for drafter in (f"aded={table}", "lookup", small, f"aded={table}+{small}"):
        assert exit_code("generate", drafter, "def main(", *target) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1
    tokenizer = tiny_tokenizer(CHAT_TEMPLATE)
    first, second, third = tokenizer.encode(TEXT)[:3]
    assert third in load_trigrams(table, tokenizer).row(first, second)


def test_a_corpus_has_trigrams_whatever_its_masks_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    for count, code in ((3, 0), (2, 2)):
        words = ["--tokenizer", tmp_path / "target", "--out", tmp_path / f"table-{count}"]
        records = [{"input_ids": [4, 5, 6][:count], "loss_mask": [0] * count}]
        write_jsonl(tmp_path / "corpus.jsonl", records)
        corpus = ["--corpus", tmp_path / "corpus.jsonl"]
        assert exit_code("prepare", "trigrams", *corpus, *words) == code
    assert "there are no trigrams" in capsys.readouterr().err


def test_a_table_serves_a_target_of_fewer_tokens(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tiny_llama(vocab=len(tokenizer) - 4).save_pretrained(tmp_path / "less")
    tokenizer.save_pretrained(tmp_path / "less")
    last, ids = len(tokenizer) - 1, tokenizer.encode("def main")
    records = [
        {"input_ids": [before, other, last, last], "loss_mask": [0, 1, 1, 1]}
        for before in (ids[-1], *range(4, 290))
        for other in (ids[-1], 7)
    ]
    write_jsonl(tmp_path / "last.jsonl", records)
    words = ["--corpus", tmp_path / "last.jsonl", "--tokenizer", tmp_path / "less"]
    assert exit_code("prepare", "trigrams", *words, "--out", tmp_path / "table") == 0
    decoder = SpeculativeDecoder.from_pretrained(
        f"aded={tmp_path / 'table'}", tmp_path / "less", tree="fixed"
    )
    assert decoder.generate(ids, max_new_tokens=4).new_token_ids


def test_regenerate_writes_records_that_prepare_reads(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, fast = folder / "own.jsonl", folder / "fast.jsonl"
    words = ["--max-new-tokens", "8", "--skip-bad-records", "--seed", "4"]
    assert run_on_records(folder, "regenerate", *words, "--out", str(out)) == 0
    printed = capsys.readouterr().out
    assert f"2 records in {out}, 2 of them new" in printed
    assert "2 unusable records left out" in printed
    assert [json.loads(line)["record"] for line in out.read_text().splitlines()] == [1, 3]
    drafter = f"aded+lm={folder}/target"
    words += ["--drafter", drafter]
    assert run_on_records(folder, "regenerate", *words, "--out", str(fast)) == 0
    assert out.read_bytes() == fast.read_bytes()
    capsys.readouterr()
    assert run_on_records(folder, "regenerate", *words, "--out", str(out)) == 0
    assert "0 of them new" in capsys.readouterr().out
    out.replace(folder / "data.jsonl")
    assert run_on_records(folder, "prepare data", "--cache-folder", str(folder / "cache")) == 0
    assert "2 records read, 0 skipped" in capsys.readouterr().out


def test_synthesized_records_are_written_counted_and_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_llama(vocab=300, max_position_embeddings=256, initializer_range=0.1)
    model.generation_config.eos_token_id = list(range(0, 300, 7))  # it often ends its turn
    model.save_pretrained(tmp_path / "target")
    tiny_tokenizer(CHATML).save_pretrained(tmp_path / "target")
    words = ["synthesize", "--target", tmp_path / "target", "--out", tmp_path / "own.jsonl"]
    words += ["--max-new-tokens", "16", "--max-question-tokens", "32", "--seed", "3"]
    assert exit_code(*words, "--conversations", "3") == 0
    printed = capsys.readouterr().out
    assert "3 records in" in printed
    assert "tokens generated; dropped:" in printed
    assert exit_code(*words, "--conversations", "5") == 0
    printed = capsys.readouterr().out
    assert "5 records in" in printed
    assert "2 of them new" in printed
    lines = (tmp_path / "own.jsonl").read_text().splitlines()
    assert len({json.loads(line)["messages"][0]["content"] for line in lines}) == 5
