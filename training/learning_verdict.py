"""What shares of the documents led to, and whether more of them would help."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_SPREAD = 2.0  # standard errors within which a difference may be chance


@dataclass(frozen=True)
class Point:
    """What one share of the documents led to.

    Attributes:
        share: of the documents.
        tokens: of these documents.
        epochs: times that they were read.
        agreement: how often drafter and target agree on the next token of held-out text.
        loss: on held-out text.
        positions: of held-out text that these are means over.
        tau: tokens per forward of the target at the first temperature, if it was measured.
    """

    share: float
    tokens: int
    epochs: float
    agreement: float
    loss: float
    positions: int
    tau: float | None

    @property
    def line(self) -> str:
        """What a reader sees of it."""
        tau = "" if self.tau is None else f", tau {self.tau:.2f}"
        return (
            f"{self.share:g} of the documents, {self.tokens:,} tokens, {self.epochs:.1f} epochs: "
            f"agreement {self.agreement:.1%}, loss {self.loss:.3f}{tau}"
        )


def verdict(points: Sequence[Point]) -> str:
    """Return a sentence on whether more data would help, judging by the two largest shares."""
    before, last = points[-2:]
    if before.epochs < 1:
        return (
            f"The data is not read once in these steps (the smaller share {before.epochs:.2f} "
            "times): train for more steps before asking for more data."
        )
    if last.tokens == before.tokens:
        return "The two largest shares hold the same documents: nothing follows for more data."
    doublings = math.log2(last.tokens / before.tokens)
    gain = last.agreement - before.agreement
    chance = _SPREAD * math.sqrt(sum(_variance(point) for point in (before, last)))
    change = (
        f"From {before.tokens:,} to {last.tokens:,} tokens agreement went from "
        f"{before.agreement:.1%} to {last.agreement:.1%}, {gain / doublings * 100:+.1f} points "
        "per doubling"
    )
    if gain > chance:
        return f"{change}: more data of this kind would help."
    return (
        f"{change}, within chance ({chance * 100:.1f}): more data would hardly help at this size."
    )


def _variance(point: Point) -> float:
    """Return that of an agreement whose positions were independent, which is the least there is."""
    return point.agreement * (1 - point.agreement) / max(1, point.positions)
