"""Configurations and drafters can be named; commands name the extra of a package they lack."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from helpers.models import tiny_llama
from helpers.tokenizers import tiny_tokenizer

from jakiro.drafter import JakiroDrafter
from jakiro.utils.packaged import (
    EXTRAS,
    assets_of,
    config_names,
    config_path,
    configs_folder,
    packaged_drafter,
    packaged_names,
)
from jakiro.utils.settings import read_layered_yaml

NAME = "smollm2-135m-instruct"
ROOT = Path(__file__).parents[3]


_OPTIONAL = sorted({package for packages in EXTRAS.values() for package in packages})
# Runs a command of Jakiro as if the optional packages were not installed.
_WITHOUT_EXTRAS = f"""
import sys
from importlib.machinery import PathFinder

class WithoutExtras(PathFinder):
    @classmethod
    def find_spec(cls, name, *arguments):
        if name.partition(".")[0] in {_OPTIONAL}:
            return None
        return super().find_spec(name, *arguments)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutExtras
from jakiro.cli import main
try:
    main(sys.argv[1:])
finally:
    print("torch was imported:", "torch" in sys.modules)
"""


def test_names_are_paths_without_suffix() -> None:
    names = config_names()
    assert {"base", "drafters/eagle3", "targets/llama3-8b", "ablations/tail-0"} <= set(names)
    assert all(config_path(Path(name)).is_file() for name in names)


def test_a_file_anywhere_extends_a_packaged_configuration(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("extends: drafters/eagle3\ndrafter: {tail_layers: 0}\n")
    original = read_layered_yaml(configs_folder() / "drafters" / "eagle3.yaml")
    assert read_layered_yaml(path)["drafter"]["trunk"] == original["drafter"]["trunk"]
    assert read_layered_yaml(Path("drafters/eagle3")) == original


def test_a_drafter_is_named_after_its_target() -> None:
    assert NAME in packaged_names()
    folder = packaged_drafter(NAME)
    assert folder == assets_of(NAME) / "drafter"
    assert JakiroDrafter.from_pretrained(NAME).config.target_record.name_or_path == NAME


def test_other_names_are_those_of_no_packaged_drafter() -> None:
    for name in ("qwen", ".", "..", "", f"owner/{NAME}", f"../assets/{NAME}"):
        assert packaged_drafter(name) is None


def test_the_extras_are_those_of_the_project_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = project["optional-dependencies"]
    for extra, packages in EXTRAS.items():
        names = [re.split("[^a-z_]", requirement)[0] for requirement in declared[extra]]
        assert set(packages) - {"pyarrow"} == set(names)
    always = {re.split("[^a-z-]", requirement)[0] for requirement in project["dependencies"]}
    assert always.isdisjoint(_OPTIONAL)


def _run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _WITHOUT_EXTRAS, *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
def test_decoding_works_without_extras_and_training_names_one(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tiny_llama(vocab=len(tokenizer)).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    words = ["generate", "lookup", "def", "--raw", "--target", "target", "--max-new-tokens", "4"]
    decoded = _run(tmp_path, *words, "--tree", "fixed")
    assert decoded.returncode == 0, decoded.stderr
    (tmp_path / "my.yaml").write_text(
        "target: {name_or_path: target}\ndata: {paths: [texts.jsonl]}\nsteps: 1\n"
    )
    (tmp_path / "texts.jsonl").write_text('{"text": "def"}\n')
    refused = _run(tmp_path, "train", "--config", "my.yaml")
    assert refused.returncode == 2
    assert "the extra `train`" in refused.stderr
    assert "torch was imported: False" in refused.stdout
