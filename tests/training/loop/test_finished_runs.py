"""A finished run is recognized before its target and its data are loaded."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.training import tiny_run, write_jsonl

from jakiro.errors import ConfigError
from training.train import train


def _fail(*_: Any, **__: Any) -> None:
    raise AssertionError("the target or the data is loaded")


def test_a_finished_run_says_so_before_it_loads_anything(
    workshop: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = tiny_run(workshop, steps=2)
    folder = train(settings)
    with monkeypatch.context() as patch, caplog.at_level("INFO"):
        patch.setattr("training.train.prepare", _fail)
        assert train(settings) == folder
    assert f"the run in {settings.run_folder} is already finished" in caplog.text


def _change_weights(folder: Path) -> None:
    os.utime(folder / "target" / "model.safetensors", ns=(1, 1))


def _change_data(folder: Path) -> None:
    write_jsonl(folder / "texts.jsonl", ({"text": f"text number {n} " * 9} for n in range(9)))


@pytest.mark.parametrize("change", [_change_weights, _change_data])
def test_changed_files_are_read_again(
    workshop: Path, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tiny_run(workshop, steps=2)
    train(settings)
    change(workshop)
    with monkeypatch.context() as patch:
        patch.setattr("training.train.prepare", _fail)
        with pytest.raises(AssertionError, match="is loaded"):
            train(settings)
    if change is _change_data:
        with pytest.raises(ConfigError, match="data_fingerprint differs"):
            train(settings)
    else:  # the weights themselves are the same
        assert train(settings) == settings.run_folder / "drafter"


def test_other_settings_are_compared_with_the_whole_run(workshop: Path) -> None:
    train(tiny_run(workshop, steps=2))
    with pytest.raises(ConfigError, match="holds a run with other settings"):
        train(tiny_run(workshop, steps=2, seed=1))
