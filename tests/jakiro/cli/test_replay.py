"""`jakiro replay` prints a table, stores the results, and refuses mistakes before it starts."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from helpers.models import tiny_drafter, tiny_llama
from helpers.tokenizers import tiny_tokenizer

from inference.benchmark.replay.document import ReplayDocument
from inference.benchmark.replay.steps import replay
from jakiro.cli import main
from jakiro.target.adapter import TargetAdapter


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, two drafters and prompts."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = tiny_tokenizer()
    model = tiny_llama(vocab=len(tokenizer))
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    for seed in range(2):
        tiny_drafter(TargetAdapter(model), seed=seed).save_pretrained(folder / f"drafter-{seed}")
    records = [{"prompt": text} for text in ("def main(", "print(", "return 41", "import")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def _run(folder: Path, *words: str) -> int:
    places = ["--target", str(folder / "target"), "--prompts", str(folder / "prompts.jsonl")]
    with pytest.raises(SystemExit) as exit_info:
        main(["replay", *places, "--device", "cpu", "--max-new-tokens", "6", *words])
    return int(exit_info.value.code or 0)


def test_one_command_compares_drafters(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"--drafter=one={folder / 'drafter-0'}", f"--drafter=two={folder / 'drafter-1'}"]
    words += ["--trees", "candidates=5", "--temperature", "0", "--temperature", "1"]
    file = tmp_path / "result.json"
    assert _run(folder, *words, "--num-prompts", "3", "--json", str(file)) == 0
    printed = capsys.readouterr().out
    assert "T = 1, candidates=5; 1 training, 3 prompts, 18 tokens" in printed
    assert "tau / one" in printed
    document = ReplayDocument.model_validate_json(file.read_text())
    assert document.prompts == 3
    assert [row.drafter for row in document.rows] == ["one", "two"] * 2


def test_sigterm_ends_with_what_was_replayed(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    read, count = replay, [0]

    def interrupted(*args: Any) -> Any:
        count[0] += 1
        if count[0] == 4:
            signal.raise_signal(signal.SIGTERM)
        return read(*args)

    monkeypatch.setattr("inference.benchmark.replay.comparison.replay", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    file = tmp_path / "result.json"
    words = [f"--drafter=one={folder / 'drafter-0'}", "--batch-size", "2", "--temperature", "0"]
    assert _run(folder, *words, "--temperature", "1", "--json", str(file)) == 130
    document = ReplayDocument.model_validate_json(file.read_text())
    assert (document.is_complete, document.prompts, len(document.rows)) == (False, 4, 2)
    assert "The replay was interrupted" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--drafter", "one=nowhere/at/all"), "nowhere/at/all"),
        (("--drafter", "DRAFTER"), "expected: NAME=PATH"),
        (("--drafter", "one=DRAFTER", "--trees", "candidates=0"), "with N from 1 to"),
        (("--drafter", "one=DRAFTER", "--batch-size", "0"), "--batch-size"),
        (("--drafter", "one=DRAFTER", "--max-new-tokens", "1"), "--max-new-tokens"),
    ],
)
def test_mistakes_are_reported(
    words: tuple[str, ...], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = [word.replace("DRAFTER", str(folder / "drafter-0")) for word in words]
    assert _run(folder, *known) == 2
    assert message in " ".join(capsys.readouterr().err.split())
