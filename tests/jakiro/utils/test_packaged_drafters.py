"""The drafters in the package can be named after their targets."""

import json
from pathlib import Path

import pytest

from jakiro.drafter import JakiroDrafter
from jakiro.utils.packaged_drafters import assets_of, packaged_drafter, packaged_names

NAME = "smollm2-135m-instruct"
RESULTS = Path(__file__).parents[3] / "docs" / "benchmarks" / "results"


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


def test_a_folder_of_the_same_name_is_preferred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / NAME).mkdir()
    monkeypatch.chdir(tmp_path)
    assert packaged_drafter(NAME) is None
