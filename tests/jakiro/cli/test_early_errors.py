"""A wrong name or path is refused before the import of torch, which takes seconds."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import jakiro
from jakiro.cli import main
from jakiro.cli.options import existing_file, existing_model, readable_settings
from jakiro.errors import CheckpointError, ConfigError

MISTAKES = (
    "generate /nope Why?",
    "generate lookup Why?",
    "generate lookup Why? --target /nope",
    "generate aded=/nope Why? --target .",
    "generate lm=/nope Why? --target .",
    "generate lookup Why? --target . --threads none",
    "chat lokup --target .",
    "chat ./named",
    "serve --drafter aded+drafter=/nope --target .",
    "bench --target /nope --method lookup --prompts prompts.txt",
    "bench --target . --method lokup --prompts prompts.txt",
    "bench --target . --method lookup --prompts nope.txt",
    "bench --target . --method lookup+drafter=/nope --prompts prompts.txt",
    "bench --target . --method transformers-assisted=/nope --prompts prompts.txt",
    "verify",
    "verify --drafter /nope",
    "verify --drafter lookup --target . --samples 60 --quick",
    "train --config nope.yaml",
    "train --config base --set steps",
    "train --config base",
    "train --config my.yaml --set stepz=1",
    "train --config my.yaml --set drafter.tail_layers=1",
    "train --config my.yaml --set data.paths=[nope.jsonl]",
    "train --config my.yaml --set target.name_or_path=/nope",
    "train --config my.yaml --set evaluation.prompts=nope.txt",
    "train --config my.yaml --set initialize.drafter=/nope",
    "train --config my.yaml --dry-run --micro-batch-size x",
    "train --config my.yaml --dry-run --set data.paths=[nope.jsonl]",
    "features --config my.yaml --out states --set steps=0",
    "features --config my.yaml --out states --set data.paths=[nope.jsonl]",
    "throughput --config my.yaml --set stepz=1",
    "ablate --base base --config nope.yaml --out study",
    "bench --target . --method lookup --prompts prompts.txt --max-new-tokens 0",
    "bench --target . --method lookup --prompts prompts.txt --json nope/out.json",
    "bench --target . --method lookup --prompts prompts.txt --baseline aded",
    "plot nope --out curves.png",
    "fetch nope",
    "train --config my.yaml --hostfile nope",
    "serve --drafter lookup --target . --keys-file nope",
    "serve --drafter lookup --target . --adapt shared",
    "verify --drafter lookup --target . --samples 3",
    "init . --out my.yaml",
    "regenerate --target . --data chats.jsonl --out own.jsonl --max-new-tokens 0",
    "synthesize --target . --conversations 0 --out own.jsonl",
    "serve --drafter lookup --target . --port 99999",
    "serve --drafter lookup --target . --host 0.0.0.0",
    "serve --drafter lookup --target . --port PORT",
    "features --config broken.yaml --out states",
    "ablate --base nope.yaml --config base --out study",
    "throughput --config nope.yaml",
    "init /nope",
    "prepare --target . --data nope.jsonl",
    "regenerate --target . --data nope.jsonl --out own.jsonl",
    "synthesize --target . --conversations 1 --out own.jsonl --drafter /nope",
    "import /nope --target . --out drafter",
    "import . --target . --out named",
    "export /nope --to vllm --out drafter",
    "export named --to vllm --out named",
)

SETTINGS = """\
extends: base
target: {name_or_path: .}
data: {paths: [chats.jsonl]}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a drafter whose target is missing, prompts, and a broken file."""
    (tmp_path / "named").mkdir()
    config = {"target": {"name_or_path": "/nope"}}
    (tmp_path / "named" / "config.json").write_text(json.dumps(config))
    (tmp_path / "prompts.txt").write_text("Why?\n")
    (tmp_path / "broken.yaml").write_text("steps: [")
    (tmp_path / "chats.jsonl").write_text("")
    (tmp_path / "my.yaml").write_text(SETTINGS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_mistakes_are_refused_before_torch_is_imported(folder: Path) -> None:
    program = (
        "import sys\n"
        "from jakiro.cli import main\n"
        "for words in sys.argv[1:]:\n"
        "    try:\n"
        "        main(words.split())\n"
        "    except SystemExit as exit_:\n"
        "        print(words, exit_.code, 'torch' in sys.modules, sep='|')\n"
    )
    command = [sys.executable, "-c", program]
    environment = os.environ | {"PYTHONPATH": str(Path(jakiro.__file__).parents[1])}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        mistakes = [words.replace("PORT", str(taken.getsockname()[1])) for words in MISTAKES]
        done = subprocess.run(
            [*command, *mistakes],
            check=True,
            capture_output=True,
            text=True,
            cwd=folder,
            env=environment,
        )
    assert done.stdout.splitlines() == [f"{words}|2|False" for words in mistakes]
    lines = done.stderr.splitlines()
    assert len(lines) == len(MISTAKES)
    assert all(line.startswith("error: ") for line in lines)
    assert [line for line in lines if "; remedy: " not in line] == [
        "error: --threads cannot be used; expected: auto, or a number of at least 1; got: none"
    ]


def test_the_target_that_a_drafter_names_is_missing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["generate", str(folder / "named"), "Why?"])
    message = capsys.readouterr().err
    assert message.startswith("error: cannot load the target /nope; ")
    assert "--target on the command line" in message


@pytest.mark.parametrize(("count", "is_warned_of"), [("2", False), ("3", True), ("auto", False)])
def test_more_threads_than_processors_are_warned_of_at_once(
    count: str,
    is_warned_of: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with pytest.raises(SystemExit):
        main(["generate", "--threads", count, "/nope", "Why?"])
    *warnings, error = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert len(warnings) == is_warned_of
    assert all("expected: at most 2; got: 3; remedy: " in line for line in warnings)


def test_what_exists_is_accepted(folder: Path) -> None:
    assert existing_file(folder / "prompts.txt") == folder / "prompts.txt"
    assert existing_model(str(folder)) == str(folder)
    assert readable_settings(Path("base")) == Path("base")
    assert existing_file(None) is existing_model(None) is None


def test_a_folder_is_not_a_file_and_a_name_is_not_a_model(folder: Path) -> None:
    with pytest.raises(ConfigError, match="got: a folder"):
        existing_file(folder)
    with pytest.raises(CheckpointError, match="got: a path at which nothing exists"):
        existing_model("./nope")
    with pytest.raises(ConfigError, match=r"broken\.yaml is not YAML"):
        readable_settings(folder / "broken.yaml")
