"""A run's folder records how its result was made."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml

import jakiro.utils.provenance
from jakiro.utils.provenance import provenance, write_provenance
from jakiro.utils.settings import Settings, load_settings


class Recipe(Settings):
    num_steps: int = 3


def test_a_run_folder_holds_the_resolved_settings_and_the_provenance(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_provenance(folder, Recipe(num_steps=5))
    assert load_settings(Recipe, folder / "config.yaml") == Recipe(num_steps=5)
    record = json.loads((folder / "provenance.json").read_text())
    assert set(record) == {"argv", "time", "git", "versions", "platform", "num_cpus"}
    assert yaml.safe_load((folder / "config.yaml").read_text()) == {"num_steps": 5}


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_checkout_is_named_with_its_commit_and_whether_it_was_changed(
    is_changed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jakiro.utils.provenance, "_CODE", tmp_path)
    _git(tmp_path, "init")
    _git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--allow-empty", "-mx")
    if is_changed:
        (tmp_path / "new").touch()
    found = provenance()["git"]
    assert found == {"sha": _git(tmp_path, "rev-parse", "HEAD"), "is_dirty": is_changed}
    (tmp_path / "newer").touch()  # when the code runs already
    assert provenance()["git"] == found


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
