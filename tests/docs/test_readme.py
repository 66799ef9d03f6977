"""What the README promises: its blocks of code run as they stand."""

import re
import shutil
import subprocess
from inspect import signature
from pathlib import Path

import pytest
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.tokenizers import tiny_tokenizer

from jakiro.cli.bench import bench
from jakiro.cli.train import train
from jakiro.config import config_for
from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter
from jakiro.target.record import record_target
from jakiro.utils.settings import load_settings
from training.config import TrainSettings
from training.studies.ablation.main import parse as parse_ablation

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target with its tokenizer, and a drafter for it, saved as a user would have them."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = tiny_tokenizer()
    model = tiny_llama(vocab=len(tokenizer), max_position_embeddings=512)
    target_path, drafter_path = folder / "target", folder / "drafter"
    model.save_pretrained(target_path)
    tokenizer.save_pretrained(target_path)
    target = TargetAdapter(model)
    record = record_target(target.spec, str(target_path), tokenizer)
    drafter = tiny_drafter(target)
    JakiroDrafter(config_for(tiny_settings(), record)).save_pretrained(drafter_path)
    assert drafter.num_parameters() > 0
    return {"target_path": str(target_path), "drafter_path": str(drafter_path)}


@pytest.mark.parametrize(
    "block", _blocks("python"), ids=["decode", "ways to call", "own target", "untrained"]
)
def test_python_blocks_of_the_readme_run(
    block: str, saved: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, object] = dict(saved)
    exec(block, names)
    output = names.get("output") or names["second"]
    assert output.sequences.shape[0] == 1  # type: ignore[attr-defined]


@pytest.fixture
def own_file(tmp_path: Path) -> Path:
    """The README's first YAML block as a file beside `configs/`."""
    block, _ = _blocks("yaml")
    file = tmp_path / "my.yaml"
    file.write_text(block)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    return file


def test_the_yaml_block_of_the_readme_is_a_valid_training_run(own_file: Path) -> None:
    assert load_settings(TrainSettings, own_file).data.paths == ("chats.jsonl",)


def test_the_drafter_that_the_readme_advises_is_one(own_file: Path) -> None:
    _, advice = _blocks("yaml")
    own_file.write_text(own_file.read_text().replace("extends: configs/base.yaml\n", advice))
    drafter = load_settings(TrainSettings, own_file).drafter
    assert not drafter.trunk.attends_memory
    assert drafter.experts.num_experts == 1


@pytest.mark.parametrize("override", re.findall(r"--set (\S+)", README))
def test_overrides_in_the_readme_name_real_settings(own_file: Path, override: str) -> None:
    assert load_settings(TrainSettings, own_file, [override]).steps > 0


def _commands(program: str) -> list[list[str]]:
    """The words of the README's commands that begin with a program."""
    lines = "".join(_blocks("bash")).replace("\\\n", " ").splitlines()
    return [line.split() for line in lines if line.startswith(program)]


def test_ablations_in_the_readme_are_there_and_their_options_too() -> None:
    commands = _commands("python -m training.studies.ablation.main")
    assert len(commands) == 3
    for words in commands:
        shell = ["bash", "-c", f"printf '%s\n' {' '.join(words[3:])}"]  # which expands braces
        expanded = subprocess.run(shell, capture_output=True, text=True, check=True).stdout
        options = parse_ablation(expanded.split())
        assert all((ROOT / path).exists() for path in options.config)


def test_options_of_jakiro_bench_in_the_readme_are_there() -> None:
    commands = _commands("jakiro bench")
    assert len(commands) == 2
    names = {parameter.name for parameter in signature(bench).parameters.values()}
    words = {word for command in commands for word in command if word.startswith("--")}
    assert {word.strip("-").replace("-", "_") for word in words} <= names | {"json"}


def test_options_of_jakiro_train_in_the_readme_are_there() -> None:
    commands = _commands("jakiro train")
    assert len(commands) == 3
    names = {parameter.name for parameter in signature(train).parameters.values()}
    words = {word for command in commands for word in command if word.startswith("--")}
    assert {word.strip("-").replace("-", "_") for word in words} <= names | {"set"}


def test_files_that_the_readme_links_to_exist() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_readme_opens_with_the_two_commands() -> None:
    assert _blocks("bash")[0].split()[:2] == ["make", "demo"]
    assert "make test" in _blocks("bash")[0]
