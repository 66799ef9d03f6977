"""Every block of code in the README and in the pages of the documentation runs, loads or parses."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from helpers.commands import write_models
from helpers.templates import CHATML

from inference.benchmark.settings import parse_methods
from jakiro.cli import app
from jakiro.utils import pretrained
from jakiro.utils.settings import (
    apply_overrides,
    merge,
    read_layered_yaml,
    validate_settings,
)
from training.config import TrainSettings

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
FETCHED = "smollm2-135m-instruct"

# Keys that every run requires; blocks that show single keys leave them out.
REQUIRED = {"target": {"name_or_path": "TARGET"}, "data": {"paths": ["texts.jsonl"]}}


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def _blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
        yield Block(page, 1 + text[: match.start()].count("\n"), match[1], match[2])


BLOCKS = [block for page in PAGES for block in _blocks_of(page)]


def _in(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


class Command(NamedTuple):
    """A command line of a bash block, with the shell's expansions done."""

    block: Block
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.block}: {' '.join(self.words[:3])}"

    def values_of(self, option: str) -> list[str]:
        """Return the words after an option, which may be repeated."""
        pairs = zip(self.words, self.words[1:], strict=False)
        return [value for name, value in pairs if name == option]


def _commands() -> Iterator[Command]:
    for block in _in("bash"):
        for line in block.code.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                expanded = _braces_expanded(words) if "{" in line else words
                yield Command(block, tuple(expanded))


def _braces_expanded(words: list[str]) -> list[str]:
    shell = ["bash", "-c", f"printf '%s\\n' {' '.join(words)}"]
    return subprocess.run(shell, capture_output=True, text=True, check=True).stdout.split()


COMMANDS = list(_commands())


def _of(program: str) -> list[Command]:
    return [command for command in COMMANDS if command.words[0] == program]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The paths of a saved target with its tokenizer and of a saved drafter, by variable name."""
    # Ten percent of the tokens end the text, so that the blocks take few steps.
    ends = {"max_position_embeddings": 512, "eos_token_id": [*range(270, 300)]}
    folder = write_models(tmp_path_factory.mktemp("models"), CHATML, **ends)
    return {f"{name}_path": str(folder / name) for name in ("target", "drafter")}


@pytest.fixture
def fetched(saved: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny models, under the name of a model that `jakiro fetch` downloads."""
    paths = {"drafter": Path(saved["drafter_path"]), "target": saved["target_path"]}
    original = pretrained.local_model

    def packaged_drafter(name: str | Path) -> Path | None:
        return paths["drafter"] if str(name) == FETCHED else None

    def local_model(name: str | Path, *args: Any, **options: Any) -> str:
        return paths["target"] if str(name) == FETCHED else original(name, *args, **options)

    monkeypatch.setattr("jakiro.drafter.packaged_drafter", packaged_drafter)
    monkeypatch.setattr(pretrained, "local_model", local_model)


@pytest.mark.usefixtures("fetched")
@pytest.mark.parametrize("block", _in("python"), ids=str)
def test_python_blocks_run(block: Block, saved: dict[str, str]) -> None:
    names: dict[str, object] = dict(saved)
    exec(block.code, names)
    output: Any = names.get("output") or names.get("second")
    assert output is None or output.sequences.shape[0] == 1


@pytest.fixture(scope="module")
def beside_configs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of a settings file next to a copy of `configs/`."""
    folder = tmp_path_factory.mktemp("settings")
    shutil.copytree(ROOT / "configs", folder / "configs")
    (folder / "first.yaml").write_text("extends: base\n")  # which a block extends
    return folder / "my.yaml"


@pytest.mark.parametrize("block", _in("yaml"), ids=str)
def test_yaml_blocks_are_settings_of_a_training_run(block: Block, beside_configs: Path) -> None:
    beside_configs.write_text(block.code)
    values = merge(REQUIRED, read_layered_yaml(beside_configs))
    assert validate_settings(TrainSettings, values, source=str(block)).steps > 0


@pytest.fixture(scope="module")
def jakiro() -> Any:
    """The command line, whose parameters look for no files and models."""
    program: Any = typer.main.get_command(app)
    commands = [program]
    while commands:
        command = commands.pop()
        commands += getattr(command, "commands", {}).values()
        for parameter in command.params:
            parameter.callback = None
    return program


@pytest.mark.parametrize("command", _of("jakiro"), ids=str)
def test_jakiro_commands_parse_and_name_what_is_there(command: Command, jakiro: Any) -> None:
    program, words = jakiro, list(command.words[1:])
    while hasattr(program, "commands"):
        assert words[0] in program.commands, f"{command.block}: no command {words[0]}"
        program = program.commands[words.pop(0)]
    program.make_context(program.name, words)  # raises if an option is unknown or missing
    settings = apply_overrides(REQUIRED, command.values_of("--set"))
    validate_settings(TrainSettings, settings, source=str(command))
    if command.words[1] == "bench" and "--replay" not in command.words:
        parse_methods(command.values_of("--method"))
    paths = [word.split("=")[-1] for word in command.words if "configs/" in word]
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("command", _of("make"), ids=str)
def test_make_targets_are_there(command: Command) -> None:
    targets = re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert command.words[1] in targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    paths = [link.partition("#")[0] for link in links if "://" not in link]
    assert [path for path in paths if path and not (page.parent / path).exists()] == []


def test_commands_in_the_text_are_there(jakiro: Any) -> None:
    named = {
        (page.name, word)
        for page in PAGES
        for word in re.findall(r"`jakiro ([a-z-]+)", page.read_text(encoding="utf-8"))
    }
    assert [pair for pair in sorted(named) if pair[1] not in jakiro.commands] == []
