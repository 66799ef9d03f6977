"""Draw the learning curves of `docs/benchmarks/results/block-arms.json` as a figure.

Usage: python docs/programs/curves.py
"""

import json
from pathlib import Path

from matplotlib import pyplot

DOCS = Path(__file__).parents[1]
COLORS = {"fusion-ttt-2": "#7a7a7a", "block-2": "#1f6feb"}  # other arms are light


def main() -> None:
    arms = json.loads((DOCS / "benchmarks/results/block-arms.json").read_text())["arms"]
    long, short = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True)[1]
    for name, arm in arms.items():
        points = arm["evaluations"]
        axis = long if points[-1]["tokens"] > 1_000_000 else short
        color = next((c for start, c in COLORS.items() if arm["design"] == start), "#c9a66b")
        tokens = [point["tokens"] / 1e6 for point in points]
        tau = [point["tau_probabilistic"] for point in points]
        axis.plot(tokens, tau, color=color, linewidth=1.6, marker="o", markersize=3)
        axis.annotate(
            name, (tokens[-1], tau[-1]), xytext=(4, -3), textcoords="offset points", fontsize=7
        )
    for axis, title in ((short, "up to 0.27M tokens"), (long, "2M tokens")):
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("training tokens, in millions", fontsize=8)
        axis.margins(x=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    long.set_ylabel("tau_probabilistic on held-out text", fontsize=8)
    pyplot.tight_layout()
    pyplot.savefig(DOCS / "figures/block-curves.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
