"""`jakiro prepare trigrams`, and decoding with training-free drafters from the command line."""

import json
import shlex
from pathlib import Path

import pytest
from helpers.models import tiny_drafter, tiny_llama
from helpers.tokenizers import TEXT, tiny_tokenizer

from inference import SpeculativeDecoder
from inference.benchmark.document import read_document
from inference.benchmark.method_names import parse_methods
from inference.benchmark.methods import OwnDecoding
from inference.benchmark.subject import Subject, build_methods
from inference.drafters.aded.file import load_trigrams
from inference.drafters.combined.drafter import CombinedDrafter
from inference.drafters.combined.knowledge import CombinedSettings
from inference.trees.shape import TreeShape
from jakiro.cli import main
from jakiro.target.adapter import TargetAdapter


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, a smaller model, prompts and a corpus."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = tiny_tokenizer()
    tiny_llama(vocab=len(tokenizer)).save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    tiny_llama(vocab=len(tokenizer), num_hidden_layers=1).save_pretrained(folder / "small")
    tokenizer.save_pretrained(folder / "small")
    records = [{"prompt": text} for text in ("def main(", "print(")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "corpus").mkdir()
    (folder / "corpus" / "a.py").write_text(TEXT)
    (folder / "corpus" / "rows.jsonl").write_text(json.dumps({"text": TEXT * 2}) + "\n")
    return folder


def _run(*words: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main(list(words))
    return int(exit_info.value.code or 0)


def _build(folder: Path, out: Path, *words: str, corpus: str = "corpus") -> int:
    paths = ["--corpus", str(folder / corpus), "--tokenizer", str(folder / "target")]
    return _run("prepare", "trigrams", *paths, "--out", str(out), *words)


def test_a_corpus_becomes_a_table_that_decoding_starts_with(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = ("table", "own.yaml", "sharing.yaml", "figures.json")
    table, settings, sharing, figures = (tmp_path / name for name in paths)
    assert _build(folder, table) == 0
    stored, use = capsys.readouterr().err.splitlines()[-2:]
    assert "; stored those of " in stored
    words = shlex.split(use.removeprefix("use them with: jakiro "))
    assert words == ["generate", f"aded={table}", "PROMPT", "--target", "TARGET"]
    assert _run(*words[:-1], str(folder / "target"), "--max-new-tokens", "4") == 0
    tokenizer = tiny_tokenizer()
    first, second, third = tokenizer.encode(TEXT)[:3]
    assert third in load_trigrams(table, tokenizer).row(first, second)

    settings.write_text("depth: 3\n")
    sharing.write_text("num_nodes: 5\n")
    methods = ["autoregressive", f"aded={table},candidates=4", f"aded,settings={settings},name=own"]
    methods += ["lookup,candidates=6", f"lm={folder / 'small'},candidates=9"]
    methods += [f"lookup+lm={folder / 'small'}", "lookup,merged-repeats=9,name=repeats"]
    methods += [f"aded={table}+lm={folder / 'small'},second-settings={settings},name=both"]
    methods += [f"lookup+lm={folder / 'small'},pair-settings={sharing},name=shared"]
    words = [word for method in methods for word in ("--method", method)]
    words += ["--target", str(folder / "target"), "--prompts", str(folder / "prompts.jsonl")]
    words += ["--device", "cpu", "--num-prompts", "2", "--max-new-tokens", "4"]
    words += ["--json", str(figures)]
    assert _run("bench", *words, "--temperature", "0", "--temperature", "1") == 0
    document = read_document(figures)
    names = {"aded", "own", "lookup", "lm", "lookup+lm", "repeats", "both", "shared"}
    for name in names:
        assert document.figures(name, 0.0).identical_to_target


def test_a_tree_goes_to_the_trained_drafter_of_a_pair(folder: Path, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    target = TargetAdapter(tiny_llama(vocab=len(tokenizer)))
    tiny_drafter(target).save_pretrained(tmp_path / "drafter")
    name, tree = f"lookup+drafter={tmp_path / 'drafter'}", TreeShape(num_nodes=5)
    decoder = SpeculativeDecoder.from_pretrained(name, folder / "target", tree)
    assert isinstance(decoder.drafter, CombinedDrafter)
    assert decoder.drafter.first.plan.greedy == tree


def test_a_file_sets_how_two_drafters_share_trees(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "sharing.yaml").write_text("num_nodes: 5\ntrust: 0.25\n")
    tokenizer = tiny_tokenizer()
    target = TargetAdapter(tiny_llama(vocab=len(tokenizer)))
    tiny_drafter(target).save_pretrained(tmp_path / "drafter")
    for first in (f"lm={folder / 'small'}", f"drafter={tmp_path / 'drafter'}"):
        name = f"lookup+{first},pair-settings={tmp_path / 'sharing.yaml'}"
        [method] = build_methods(parse_methods([name]), Subject(target.model, tokenizer))
        assert isinstance(method, OwnDecoding)
        assert isinstance(method.decoder.drafter, CombinedDrafter)
        assert method.decoder.drafter.settings == CombinedSettings(num_nodes=5, trust=0.25)


def test_text_is_continued_without_training(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = ["--target", str(folder / "target"), "--max-new-tokens", "6"]
    texts = []
    for drafter in ("aded", "lookup", f"lm={folder / 'small'}", f"aded+lm={folder / 'small'}"):
        assert _run("generate", drafter, "def main(", *target) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1


def test_a_table_serves_a_target_of_fewer_tokens(folder: Path, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tiny_llama(vocab=len(tokenizer) - 4).save_pretrained(tmp_path / "less")
    tokenizer.save_pretrained(tmp_path / "less")
    last, ids = len(tokenizer) - 1, tokenizer.encode("def main")
    records = [
        {"input_ids": [each, other, last, last], "loss_mask": [0, 1, 1, 1]}
        for each in (ids[-1], *range(4, 290))
        for other in (ids[-1], 7)
    ]
    (folder / "last.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert _build(folder, tmp_path / "table", corpus="last.jsonl") == 0
    decoder = SpeculativeDecoder.from_pretrained(
        f"aded={tmp_path / 'table'}", tmp_path / "less", tree="fixed"
    )
    assert decoder.generate(ids, max_new_tokens=4).new_token_ids
