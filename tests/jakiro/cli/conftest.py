"""A stand-in for the demo, which takes minutes."""

import sys
from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.fixture
def plant_demo(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., None]], None]:
    """A function that replaces the demo with another function."""

    def plant(run_demo: Callable[..., None]) -> None:
        module = ModuleType("jakiro.demo")
        module.run_demo = run_demo  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "jakiro.demo", module)

    return plant
