"""Learning curve: the same training on nested fractions of the documents.

The curve shows whether more data would help. All runs take the same number of steps: with the same
number of epochs, a run on more data would also be trained for longer, and would be better even if
the additional documents contained nothing new. All runs are measured on the same validation data.
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

from inference.benchmark.report.style import CURVE, THEME
from jakiro.config import JakiroConfig
from jakiro.errors import ConfigError
from jakiro.utils.files import write_atomically
from jakiro.utils.wording import rounded
from training.config import TrainSettings, decoding_rule
from training.data.held_out import split_validation
from training.data.packing import PackedSequences
from training.loop.run_folder import RunFolder
from training.setup.loading import load_tokenizer
from training.setup.preparation import open_store

_SPREAD = 2.0  # a difference of fewer standard errors is considered noise


@dataclass(frozen=True)
class Point:
    """Result of the training on one fraction of the documents.

    Attributes:
        share: fraction of the documents.
        tokens: number of tokens in these documents.
        epochs: number of times that the documents were read, which may be a fraction.
        agreement: fraction of validation positions at which drafter and target agree on the next
            token.
        loss: loss on the validation data.
        positions: number of validation positions.
        tau: tokens per forward pass of the target at the first temperature measured; None if tau
            was not measured.
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
        """The result as a line of text."""
        tau = "" if self.tau is None else f", tau {self.tau:.2f}"
        return (
            f"{self.share:g} of the documents, {self.tokens:,} tokens, {self.epochs:.1f} epochs: "
            f"agreement {self.agreement:.1%}, loss {self.loss:.3f}{tau}"
        )


def verdict(points: Sequence[Point]) -> str:
    """Return a sentence on whether more data would help, based on the two largest fractions."""
    before, last = points[-2:]
    if before.epochs < 1:
        return (
            f"The run on the second largest subset covers only {before.epochs:.2f} of an epoch; "
            "increase `steps` first."
        )
    if last.tokens == before.tokens:
        return (
            "The effect of more data is unknown: the two largest subsets have the same documents."
        )
    doublings = math.log2(last.tokens / before.tokens)
    gain = last.agreement - before.agreement
    noise = _SPREAD * math.sqrt(sum(_variance(point) for point in (before, last)))
    change = (
        f"From {before.tokens:,} to {last.tokens:,} tokens, agreement changed from "
        f"{before.agreement:.1%} to {last.agreement:.1%}, {gain / doublings * 100:+.1f} points "
        "per doubling"
    )
    if gain > noise:
        return f"{change}: more data of this kind would help."
    if gain < -noise:
        return (
            f"{change}: agreement fell, which more data alone does not explain; increase `steps`, "
            "so that every run sees its documents several times."
        )
    return f"{change}, within noise ({noise * 100:.1f} points): more data would hardly help."


def _variance(point: Point) -> float:
    """Return the variance of the agreement, assuming that positions are independent."""
    return point.agreement * (1 - point.agreement) / max(1, point.positions)


_PANEL = (3.2, 2.8)  # inches


def plot(points: Sequence[Point], sentence: str, path: Path) -> None:
    """Write a PNG with a panel for each metric, and the verdict below the panels.

    Args:
        points: results, in ascending order of their fraction of the documents.
        sentence: verdict.
        path: path of the PNG.
    """
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
    panel.plot(tokens, [getattr(point, name) for point in points], "o-", color=CURVE)
    panel.set_title("validation loss" if name == "loss" else name)
    panel.set_xscale("log", base=2)
    panel.set_xticks(tokens, [rounded(count) for count in tokens])
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.grid(axis="y")
    panel.spines[["top", "right", "left"]].set_visible(False)


@dataclass(frozen=True)
class FractionRun:
    """A training run on one fraction of the documents.

    Attributes:
        fraction: fraction of the documents, excluding validation documents.
        settings: settings of the run, including its run folder.
    """

    fraction: float
    settings: TrainSettings

    @property
    def overrides(self) -> list[str]:
        """The overrides that turn the settings for all documents into the settings of this run."""
        return [f"data.fraction={self.fraction}", f"run_folder={json.dumps(str(self.folder.path))}"]

    @property
    def folder(self) -> RunFolder:
        """The run folder."""
        return RunFolder(self.settings.run_folder)

    @property
    def is_finished(self) -> bool:
        """Whether the run is finished."""
        return self.folder.is_finished


class LearningCurve:
    """The runs on all fractions, in sub-folders of the run folder, and the resulting curve.

    Args:
        settings: settings of the run on all documents.
        fractions: fractions of the documents, in ascending order.

    Raises:
        ConfigError: there is no validation data, the settings set `epochs`, `minutes` or
            `evaluation.patience`, or target states are read from disk.
    """

    def __init__(self, settings: TrainSettings, fractions: Sequence[float]) -> None:
        if not settings.data.validation_size or not settings.evaluation.num_sequences:
            raise ConfigError(
                "a learning curve needs validation data",
                expected="data.validation_size and evaluation.num_sequences above 0",
                got=f"{settings.data.validation_size} and {settings.evaluation.num_sequences}",
                remedy="pass --set data.validation_size=50",
            )
        if settings.minutes is not None or settings.evaluation.patience is not None:
            raise ConfigError(
                "all runs of a learning curve take the same number of steps",
                expected="no limit of minutes, and no evaluation.patience",
                got=f"minutes={settings.minutes} and patience={settings.evaluation.patience}",
                remedy="pass --set minutes=null --set evaluation.patience=null",
            )
        if settings.epochs is not None:
            raise ConfigError(
                "all runs of a learning curve take the same number of steps",
                expected="a number of steps",
                got=f"epochs of {settings.epochs:g}",
                remedy="pass --set epochs=null --set steps=1000",
            )
        if settings.target_states.source != "online":
            raise ConfigError(
                "a learning curve packs different sequences for each fraction, but target states "
                "on disk belong to the sequences for which they were written",
                expected="target_states.source=online",
                got=settings.target_states.source,
                remedy="pass --set target_states.source=online",
            )
        self._settings = settings
        self._folder = settings.run_folder.expanduser().absolute() / "learning-curve"
        self.runs = [
            _run(settings, fraction, self._folder / f"share-{fraction:g}") for fraction in fractions
        ]

    def finish(self) -> list[str]:
        """Store and plot the results of the finished runs, and return them as lines of text."""
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
            sequences = PackedSequences(store, documents, data.sequence_length, data.split)
            tokens = sum(int(store.lengths[document]) for document in documents)
            read = self._settings.num_steps * self._settings.batch.global_batch_size
            points.append(_point(run, tokens, read / len(sequences)))
        return points


def _run(settings: TrainSettings, fraction: float, folder: Path) -> FractionRun:
    data = settings.data.model_copy(update={"fraction": fraction})
    return FractionRun(fraction, settings.model_copy(update={"data": data, "run_folder": folder}))


def _point(run: FractionRun, tokens: int, epochs: float) -> Point:
    record: dict[str, Any] = JakiroConfig.from_pretrained(run.folder.drafter).record or {}
    validation = record["evaluation"]["validation"]
    decoding = record["evaluation"].get("decoding")
    return Point(
        share=run.fraction,
        tokens=tokens,
        epochs=epochs,
        agreement=validation["levels"][0]["agreement"],
        loss=validation["loss"],
        # Each position is drafted at every distance, and these drafts are not independent trials.
        positions=validation["positions"] // decoding_rule(run.settings.drafter).num_samples,
        tau=decoding[0]["tau"] if decoding else None,
    )
