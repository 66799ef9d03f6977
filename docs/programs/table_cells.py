"""Cells of the tables that the programs write: figures with intervals, and acceptance by depth."""

from collections.abc import Sequence

from inference.benchmark.stats import Ratio
from training.studies.ablation.tables import with_interval

# Kinds of prompts, by the names of the files in which their results are stored.
PROMPTS = {"humaneval": "HumanEval", "mt_bench": "MT-bench", "summarize": "Articles to summarize"}


def figure_cell(value: float, low: float, high: float) -> str:
    """Return a figure with its interval in brackets."""
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def ratio_cell(ratio: Ratio) -> str:
    """Return a ratio with its interval in brackets, in bold if the interval excludes 1."""
    text = with_interval(ratio)
    return f"**{text}**" if ratio.is_resolved else text


def by_depth_cell(rates: Sequence[float]) -> str:
    """Return conditional acceptance rates by depth."""
    return " ".join(f"{rate:.2f}".removeprefix("0") for rate in rates)
