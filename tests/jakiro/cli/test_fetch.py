"""`jakiro fetch`: the table of known models, and errors in one line."""

import pytest
from helpers.commands import exit_code

from jakiro.utils.fetch import KNOWN_MODELS


def test_known_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("fetch") == 0
    printed = capsys.readouterr().out
    assert all(f"{name}  (" in printed for name in KNOWN_MODELS)


def test_missing_packages_are_named_before_the_download(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jakiro.utils.extras.find_spec", lambda _name: None)
    monkeypatch.setattr("jakiro.utils.fetch.fetch_model", lambda *_: pytest.fail("downloads"))
    assert exit_code("fetch", next(iter(KNOWN_MODELS))) == 2
    assert "the package gguf is not installed" in (message := capsys.readouterr().err)
    assert "pip install '.[gguf]'" in message
