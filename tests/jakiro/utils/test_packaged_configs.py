"""Settings files can extend the configurations of the package by name."""

from pathlib import Path

import pytest

from jakiro.errors import ConfigError
from jakiro.utils.packaged_configs import config_names, config_path, configs_folder
from jakiro.utils.settings import read_layered_yaml


def test_names_are_paths_without_suffix() -> None:
    names = config_names()
    assert {"base", "drafters/eagle3", "targets/llama3-8b", "ablations/tail-0"} <= set(names)
    assert all(config_path(Path(name)).is_file() for name in names)


@pytest.mark.parametrize("name", ["base.yaml", "nowhere", "/base", "./drafters"])
def test_other_paths_stay_as_they_are(name: str) -> None:
    assert config_path(Path(name)) == Path(name)


def test_a_file_anywhere_extends_a_packaged_configuration(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("extends: drafters/eagle3\ndrafter: {tail_layers: 0}\n")
    original = read_layered_yaml(configs_folder() / "drafters" / "eagle3.yaml")
    assert read_layered_yaml(path)["drafter"]["trunk"] == original["drafter"]["trunk"]
    assert read_layered_yaml(Path("drafters/eagle3")) == original


def test_the_error_for_a_misspelled_name_suggests_the_nearest_one(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("extends: drafters/eagle33\n")
    with pytest.raises(ConfigError, match="configuration such as drafters/eagle3"):
        read_layered_yaml(path)


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
    with pytest.raises(ConfigError, match=f"remedy: write `extends: {name}`$"):
        read_layered_yaml(path)
    with pytest.raises(ConfigError, match=f"remedy: write {name} without a suffix$"):
        read_layered_yaml(tmp_path / written)
