"""In single precision, rounding changes no greedy token."""

import json
from pathlib import Path

import pytest
from helpers.commands import exit_code


def test_nothing_is_decided_by_rounding_in_float32(
    target_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--dtype", "float32", "--count", "2", "--new-tokens", "6"]
    assert exit_code("profile", "rounding", "--target", str(target_folder), *options) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {each["value"] for each in document["argmax_differs"].values()} == {0}
    assert {each["value"] for each in document["continuations_differ"].values()} == {0}
    assert document["positions"] == 12
