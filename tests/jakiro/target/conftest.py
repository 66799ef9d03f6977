"""Targets that are probed each time: the probe is what the tests of this folder check."""

import pytest
from helpers.known_targets import PROBE

from jakiro.target.adapter import TargetAdapter


@pytest.fixture(autouse=True)
def _every_target_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TargetAdapter, "_probe", PROBE)
