"""`jakiro demo` passes its options on, and refuses unusable options before the demo begins."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers.commands import exit_code

Demo = Callable[..., None]


def test_the_demo_gets_its_options(plant_demo: Callable[[Demo], None], tmp_path: Path) -> None:
    calls: list[tuple[Any, ...]] = []
    plant_demo(lambda *options, store: (store("figures"), calls.append(options)))
    figures = tmp_path / "f.json"
    assert exit_code("demo") == 0
    words = ["--cache-dir", "c", "--device", "cpu", "--json", str(figures)]
    assert exit_code("demo", *words) == 0
    assert figures.read_text() == "figures"
    assert calls == [(None, "auto"), (Path("c"), "cpu")]
