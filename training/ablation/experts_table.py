"""How different the experts of every arm are, as a table."""

from collections.abc import Sequence

from training.ablation.markdown import markdown_head, markdown_line
from training.ablation.results import ArmExperts


def experts_to_markdown(arms: Sequence[ArmExperts]) -> list[str]:
    """Return the lines of a table and what its columns mean."""
    lines = ["Experts on held-out text:", ""]
    lines += markdown_head(("arm", "top-4 overlap", "router entropy", "load entropy"), ("arm",))
    lines += [markdown_line(_cells(one)) for one in arms]
    return [*lines, "", _LEGEND, ""]


_LEGEND = (
    "Top-4 overlap: the share of their four likeliest tokens that two experts have in common. "
    "Router entropy: of the experts' weights at a position; load entropy: of their mean weights; "
    "in nats."
)


def _cells(one: ArmExperts) -> list[str]:
    overlap = "-" if one.top_overlap is None else f"{one.top_overlap:.3f}"
    return [one.arm, overlap, f"{one.router_entropy:.3f}", f"{one.load_entropy:.3f}"]
