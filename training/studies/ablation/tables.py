"""The table of a study's results, in Markdown."""

from collections.abc import Iterable, Sequence

from jakiro.utils.wording import rounded
from training.studies.ablation.results import ArmExperts, ArmRow, StudyResults

_NAMES = ("arm", "size", "width", "T", "tau", "tau / base", "tokens/s / base", "verdict")
_EXPERT_NAMES = ("arm", "top-4 overlap", "router entropy", "load entropy")
_LEGEND = (
    "Top-4 overlap: fraction of the four most likely tokens that two experts have in common. "
    "Router entropy: mean entropy of the experts' weights at a position. Load entropy: entropy of "
    "the experts' mean weights. Entropies are in nats."
)


def to_markdown(results: StudyResults) -> str:
    """Return the results in Markdown: table, remarks, and a table of the experts."""
    remarks = [results.note, *(interaction.sentence for interaction in results.interactions)]
    lines = [*_table(_NAMES, map(_cells, results.rows)), "", "\n\n".join(remarks), ""]
    if results.experts:
        rows = map(_expert_cells, results.experts)
        lines += ["Experts on validation data:", "", *_table(_EXPERT_NAMES, rows), "", _LEGEND, ""]
    return "\n".join(lines)


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    alignment = ["---" if name in ("arm", "verdict") else "--:" for name in names]
    return [f"| {' | '.join(cells)} |" for cells in (names, alignment, *rows)]


def _cells(row: ArmRow) -> list[str]:
    is_base = row.verdict == "base"
    return [
        row.arm,
        rounded(row.parameters),
        f"{row.intermediate_size}",
        f"{row.temperature:g}",
        f"{row.tau:.2f}",
        "1" if is_base else row.tau_ratio.shown(3),
        "1" if is_base else row.speed_ratio.shown(3),
        "" if is_base else row.verdict,
    ]


def _expert_cells(arm: ArmExperts) -> list[str]:
    overlap = "-" if arm.top_overlap is None else f"{arm.top_overlap:.3f}"
    return [arm.arm, overlap, f"{arm.router_entropy:.3f}", f"{arm.load_entropy:.3f}"]
