"""Configurations and drafters of the package can be named instead of a path."""

import json
from pathlib import Path

import pytest

from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError
from jakiro.utils.packaged import (
    assets_of,
    config_names,
    config_path,
    configs_folder,
    packaged_drafter,
    packaged_names,
)
from jakiro.utils.settings import read_layered_yaml

NAME = "smollm2-135m-instruct"
RESULTS = Path(__file__).parents[3] / "docs" / "benchmarks" / "results"


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


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("base.yaml", "base"),
        ("configs/base.yaml", "base"),
        ("configs/drafters/eagle3.yaml", "drafters/eagle3"),
    ],
)
def test_the_error_for_a_file_of_a_checkout_suggests_the_packaged_name(
    tmp_path: Path, written: str, name: str
) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(f"extends: {written}\n")
    for missing in (path, tmp_path / written):
        with pytest.raises(ConfigError, match=f"without a suffix, such as {name}$"):
            read_layered_yaml(missing)


def test_a_drafter_is_named_after_its_target() -> None:
    assert NAME in packaged_names()
    folder = packaged_drafter(NAME)
    assert folder == assets_of(NAME) / "drafter"
    assert JakiroDrafter.from_pretrained(NAME).config.target_record.name_or_path == NAME


@pytest.mark.parametrize("prompts", ["humaneval", "mt_bench", "summarize"])
def test_the_card_of_a_drafter_has_the_measured_tau(prompts: str) -> None:
    card = (assets_of(NAME) / "drafter" / "README.md").read_text()
    assert "not measured, because" not in card
    for path in RESULTS.glob(f"smollm2-fp32-{prompts}-t*.json"):
        measured = json.loads(path.read_text())["methods"]
        (found,) = [method for method in measured if method["name"] == "trained"]
        figures = (found["temperature"], found["tau"], found["tokens"])
        assert "| {:g} | {:.2f} | {} |".format(*figures) in card


@pytest.mark.parametrize("name", ["qwen", ".", "..", "", f"owner/{NAME}", f"../assets/{NAME}"])
def test_other_names_are_those_of_no_packaged_drafter(name: str) -> None:
    assert packaged_drafter(name) is None
