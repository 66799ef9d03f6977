"""Is the data enough: the same training on nested shares of the documents, with equal steps.

Equal steps, because the question is what other documents would add to the same training. With equal
epochs a larger share would also be trained for longer, and would win even if its documents said
nothing new. All runs are measured on the same held-out data.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from inference.benchmark.report.style import THEME
from jakiro.config import JakiroConfig
from jakiro.errors import ConfigError
from jakiro.utils.files import write_atomically
from training.config import TrainSettings
from training.data.packing import PackedSequences
from training.data.held_out import split_validation
from training.loop.run_folder import RunFolder
from training.setup.loading import load_tokenizer
from training.setup.preparation import open_store

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


_COLOR = "#0072b2"
_PANEL = (3.2, 2.8)  # inches


def plot(points: Sequence[Point], sentence: str, path: Path) -> None:
    """Write a PNG with one panel for each measure, and the verdict below."""
    measures = ["agreement", "loss"]
    if all(point.tau is not None for point in points):
        measures.append("tau")
    with style.context(THEME, after_reset=True):
        width, height = _PANEL
        size = (width * len(measures), height)
        figure = Figure(figsize=size, dpi=160, layout="constrained")
        for panel, name in zip(figure.subplots(1, len(measures)), measures, strict=True):
            _paint(panel, name, points)
        figure.supxlabel(f"tokens of data\n{sentence}", fontsize=7.5, wrap=True)
        figure.savefig(path, format="png")


def _paint(panel: Any, name: str, points: Sequence[Point]) -> None:
    tokens = [point.tokens for point in points]
    panel.plot(tokens, [getattr(point, name) for point in points], "o-", color=_COLOR)
    panel.set_title("held-out loss" if name == "loss" else name)
    panel.set_xscale("log", base=2)
    panel.set_xticks(tokens, [_short(count) for count in tokens])
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.grid(axis="y")
    panel.spines[["top", "right", "left"]].set_visible(False)


def _short(count: int) -> str:
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


@dataclass(frozen=True)
class FractionRun:
    """Training on one share of the documents.

    Attributes:
        share: of the documents that are not held out.
        settings: of the run, with its own folder.
    """

    share: float
    settings: TrainSettings

    @property
    def overrides(self) -> list[str]:
        """What tells it from the run of all documents, as on the command line."""
        return [f"data.fraction={self.share}", f"run_folder={json.dumps(str(self.folder.path))}"]

    @property
    def folder(self) -> RunFolder:
        """Where it trains."""
        return RunFolder(self.settings.run_folder)

    @property
    def is_finished(self) -> bool:
        """Whether it has come to its end."""
        return self.folder.is_finished


class LearningCurve:
    """The runs on all shares, in sub-folders of the run folder, and what they say together.

    Args:
        settings: of the run on all documents.
        shares: ascending.

    Raises:
        ConfigError: nothing is held out to measure on, or features are read from disk.
    """

    def __init__(self, settings: TrainSettings, shares: Sequence[float]) -> None:
        if not settings.data.validation_size or not settings.evaluation.num_sequences:
            raise ConfigError(
                "a learning curve needs documents that it is measured on",
                expected="data.validation_size and evaluation.num_sequences above 0",
                got=f"{settings.data.validation_size} and {settings.evaluation.num_sequences}",
                remedy="--set data.validation_size=50",
            )
        if settings.target_states.source == "offline":
            raise ConfigError(
                "a learning curve packs other rows for each share, and features on disk belong to "
                "the rows that they were written for",
                expected="target_states.source online",
                got="offline",
                remedy="--set target_states.source=online",
            )
        self._settings = settings
        self._folder = settings.run_folder.expanduser().absolute() / "learning-curve"
        self.runs = [_run(settings, share, self._folder / f"share-{share:g}") for share in shares]

    def finish(self) -> list[str]:
        """Store and plot what the finished runs say, and return it in lines."""

        points = self._points()
        sentence = verdict(points)
        facts = {"points": [asdict(point) for point in points], "verdict": sentence}
        write_atomically(self._folder / "learning-curve.json", json.dumps(facts, indent=1) + "\n")
        plot(points, sentence, self._folder / "learning-curve.png")
        return [*(point.line for point in points), sentence]

    def _points(self) -> list[Point]:
        data = self._settings.data
        store = open_store(self._settings, load_tokenizer(self._settings.target))
        points = []
        for run in self.runs:
            documents, _ = split_validation(store, data.validation_size, run.fraction)
            rows = PackedSequences(store, documents, data.sequence_length, data.split)
            tokens = sum(int(store.lengths[document]) for document in documents)
            read = self._settings.steps * self._settings.batch.global_batch_size
            points.append(_point(run, tokens, read / len(rows)))
        return points


def parse_fractions(text: str) -> list[float]:
    """Return shares of the documents, ascending.

    Raises:
        ConfigError: they are no numbers above 0 and up to 1, or fewer than two.
    """
    try:
        shares = sorted({float(part) for part in text.split(",")})
    except ValueError:
        shares = []
    if len(shares) < 2 or not 0 < shares[0] <= shares[-1] <= 1:
        raise ConfigError(
            "these are no shares of the documents to train on",
            expected="two or more numbers above 0 and up to 1, such as 0.25,0.5,1",
            got=text,
        )
    return shares


def _run(settings: TrainSettings, share: float, folder: Path) -> FractionRun:
    data = settings.data.model_copy(update={"fraction": share})
    return FractionRun(share, settings.model_copy(update={"data": data, "run_folder": folder}))


def _point(run: FractionRun, tokens: int, epochs: float) -> Point:
    record: dict[str, Any] = JakiroConfig.from_pretrained(run.folder.drafter).record or {}
    held_out = record["evaluation"]["held_out"]
    decoding = record["evaluation"].get("decoding")
    return Point(
        share=run.fraction,
        tokens=tokens,
        epochs=epochs,
        agreement=held_out["levels"][0]["agreement"],
        loss=held_out["loss"],
        positions=held_out["positions"],
        tau=decoding[0]["tau"] if decoding else None,
    )
