"""Automatic trees are measured against autoregressive decoding."""

import json
from pathlib import Path

import pytest
from helpers.commands import exit_code


def test_a_useless_drafter_is_measured_at_every_temperature(
    target_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--target", str(target_folder), "--count", "2", "--new-tokens", "6")
    assert exit_code("profile", "automatic", *options) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [each["temperature"] for each in document["automatic"]] == [0.0, 1.0]
    assert {each["drafter"] for each in document["automatic"]} == {"useless"}
    for each in document["automatic"]:
        assert each["slow_down"]["low"] <= each["slow_down"]["value"] <= each["slow_down"]["high"]
        assert each["tokens"] == 12
