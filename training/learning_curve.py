"""Is the data enough: the same training on nested shares of the documents, with equal steps.

Equal steps, because the question is what other documents would add to the same training. With equal
epochs a larger share would also be trained for longer, and would win even if its documents said
nothing new. All runs are measured on the same held-out data.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jakiro.config import JakiroConfig
from jakiro.errors import ConfigError
from jakiro.files import write_atomically
from training.config import TrainSettings
from training.data.packing import PackedRows
from training.held_out import choose_held_out
from training.learning_verdict import Point, verdict
from training.loading import load_tokenizer
from training.preparation import open_store
from training.run_folder import RunFolder


@dataclass(frozen=True)
class ShareRun:
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
        return [f"data.share={self.share}", f"run_folder={json.dumps(str(self.folder.path))}"]

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
        if not settings.data.held_out or not settings.evaluation.held_out_rows:
            raise ConfigError(
                "a learning curve needs documents that it is measured on",
                expected="data.held_out and evaluation.held_out_rows above 0",
                got=f"{settings.data.held_out} and {settings.evaluation.held_out_rows}",
                remedy="--set data.held_out=50",
            )
        if settings.features.source == "offline":
            raise ConfigError(
                "a learning curve packs other rows for each share, and features on disk belong to "
                "the rows that they were written for",
                expected="features.source online",
                got="offline",
                remedy="--set features.source=online",
            )
        self._settings = settings
        self._folder = settings.run_folder.expanduser().absolute() / "learning-curve"
        self.runs = [_run(settings, share, self._folder / f"share-{share:g}") for share in shares]

    def finish(self) -> list[str]:
        """Store and plot what the finished runs say, and return it in lines."""
        from training.learning_plot import plot  # needs matplotlib, a second

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
            documents, _ = choose_held_out(store, data.held_out, run.share)
            rows = PackedRows(store, documents, data.row_length, data.split)
            tokens = sum(int(store.lengths[document]) for document in documents)
            read = self._settings.steps * self._settings.batch.rows
            points.append(_point(run, tokens, read / len(rows)))
        return points


def parse_shares(text: str) -> list[float]:
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


def _run(settings: TrainSettings, share: float, folder: Path) -> ShareRun:
    data = settings.data.model_copy(update={"share": share})
    return ShareRun(share, settings.model_copy(update={"data": data, "run_folder": folder}))


def _point(run: ShareRun, tokens: int, epochs: float) -> Point:
    record: dict[str, Any] = JakiroConfig.from_pretrained(run.folder.drafter).record or {}
    held_out = record["evaluation"]["held_out"]
    decoding = record["evaluation"].get("decoding")
    return Point(
        share=run.share,
        tokens=tokens,
        epochs=epochs,
        agreement=held_out["levels"][0]["agreement"],
        loss=held_out["loss"],
        positions=held_out["positions"],
        tau=decoding[0]["tau"] if decoding else None,
    )
