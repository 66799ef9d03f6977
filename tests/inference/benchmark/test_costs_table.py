"""The tables of costs name every choice and every measured part."""

from io import StringIO
from pathlib import Path

import pytest
from helpers.models import tiny_drafter, tiny_llama
from rich.console import Console

from inference.benchmark.costs_table import costs_tables
from jakiro.target.adapter import TargetAdapter


def _printed(target: TargetAdapter, folder: Path, *, with_drafter: bool) -> str:
    drafters = {"mine": tiny_drafter(target)} if with_drafter else {}
    text = StringIO()
    console = Console(file=text, width=120)
    for table in costs_tables(target, drafters, folder):
        console.print(table)
    return " ".join(text.getvalue().split())  # titles may be wrapped


@pytest.mark.parametrize("with_drafter", [False, True], ids=["target", "drafter"])
def test_costs_and_choices_are_printed(tmp_path: Path, with_drafter: bool) -> None:
    printed = _printed(TargetAdapter(tiny_llama()), tmp_path, with_drafter=with_drafter)
    assert "without drafts" in printed
    assert "with drafts" in printed
    assert "1 thread, own weights" in printed
    assert "nodes verified: 24" in printed
    assert ("drafting passes: 3" in printed) is with_drafter
    assert ("with mine" in printed) is with_drafter
    assert ("by the format of its weights" in printed) is with_drafter


def test_the_costs_in_a_long_context_are_printed(tmp_path: Path) -> None:
    target = TargetAdapter(tiny_llama(max_position_embeddings=2048))
    printed = _printed(target, tmp_path, with_drafter=True)
    assert "nodes verified: 8, 1,024 tokens" in printed
    assert "drafting passes: 1, 1,024 tokens" in printed
