"""Measures all arms of a seed together, by `jakiro bench` in a process of its own."""

import hashlib
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from inference.benchmark.document import ComparisonDocument, read_document
from inference.benchmark.method_names import DRAFTER, PLAIN
from jakiro.errors import JakiroError
from jakiro.utils.files import ensure_writable_folder, fingerprint, write_atomically
from jakiro.utils.pretrained import TORCH_DTYPES
from training.studies.ablation.results import ArmSweep, SweepResults
from training.studies.ablation.runs import ArmRun
from training.studies.ablation.sweep import Sweep, value_name
from training.studies.ablation.trees import Trees, identity


@dataclass(frozen=True)
class Measurement:
    """How arms are measured; the same for all of them.

    Attributes:
        prompts: a prompt file of `jakiro bench`.
        num_prompts: at most so many of them.
        max_new_tokens: longest continuation.
        temperatures: 0 is greedy.
        trees: every arm is measured with all of these.
        repeats: times that a prompt is decoded.
        folder: where results are kept.
    """

    prompts: Path
    num_prompts: int
    max_new_tokens: int
    temperatures: tuple[float, ...]
    trees: tuple[Trees, ...]
    repeats: int
    folder: Path

    def of_seed(self, runs: Sequence[ArmRun]) -> ComparisonDocument:
        """Return the figures of one seed's arms beside plain decoding.

        They are measured in turns, so that speeds can be compared, and only once: until an arm is
        trained again, or something about the measurement changes.

        Args:
            runs: of one seed, all trained.

        Raises:
            JakiroError: the measurement failed.
        """
        return self._of({run.arm: run for run in runs}, [PLAIN], f"seed-{runs[0].seed}")

    def of_values(self, runs: Sequence[ArmRun]) -> ComparisonDocument:
        """Return the figures of one arm with each value of a sweep, by the values' names.

        Nothing else is measured beside them; otherwise as `of_seed`.

        Args:
            runs: of one arm and seed, all trained.
        """
        by_value = {value_name(run.value): run for run in runs if run.value is not None}
        return self._of(by_value, [], f"{runs[0].arm}-seed-{runs[0].seed}")

    def _of(
        self, runs: Mapping[str, ArmRun], others: Sequence[str], name: str
    ) -> ComparisonDocument:
        path = ensure_writable_folder(self.folder) / f"{name}.json"
        key_file, key = path.with_suffix(".key"), self._key(runs)
        known = key_file.read_text() if key_file.exists() and path.exists() else None
        if known != key:
            path.unlink(missing_ok=True)
            self._measure(runs, others, path)
            write_atomically(key_file, key)
        return read_document(path)

    def _key(self, runs: Mapping[str, ArmRun]) -> str:
        """Return a hash of everything that decides the figures, but for the machine's mood."""
        settings = _first(runs).settings
        target = settings.target
        return fingerprint(
            _digest(self.prompts),
            [self.num_prompts, self.max_new_tokens, self.temperatures, self.repeats],
            [target.name_or_path, target.dtype, settings.engine.device, identity(self.trees)],
            [
                [name, _digest(run.folder.drafter / "model.safetensors")]
                for name, run in runs.items()
            ],
        )

    def _measure(self, runs: Mapping[str, ArmRun], others: Sequence[str], path: Path) -> None:
        options = self._options(runs, others, path)
        command = [sys.executable, "-m", "jakiro", "bench", *options]
        finished = subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
        if finished.returncode or not path.exists():
            raise JakiroError(
                f"measuring {', '.join(runs)} with seed {_first(runs).seed} failed",
                expected=f"a result in {path}",
                got=f"exit code {finished.returncode}",
                remedy=f"see above, or repeat it alone: {' '.join(command)}",
            )

    def _options(self, runs: Mapping[str, ArmRun], others: Sequence[str], path: Path) -> list[str]:
        first = _first(runs)
        options = {
            "--target": first.settings.target.name_or_path,
            "--dtype": str(TORCH_DTYPES[first.settings.target.dtype]).removeprefix("torch."),
            "--device": first.settings.engine.device,
            "--prompts": str(self.prompts),
            "--num-prompts": str(self.num_prompts),
            "--max-new-tokens": str(self.max_new_tokens),
            "--repeats": str(self.repeats),
            "--seed": str(first.seed),
            "--json": str(path),
        }
        several = [("--method", one) for one in (*others, *self._methods(runs))]
        several += [("--temperature", repr(one)) for one in self.temperatures]
        return [word for pair in (*options.items(), *several) for word in pair]

    def _methods(self, runs: Mapping[str, ArmRun]) -> list[str]:
        return [
            f"{DRAFTER}={run.folder.drafter},{trees.options},name={trees.method(name)}"
            for name, run in runs.items()
            for trees in self.trees
        ]


def _first(runs: Mapping[str, ArmRun]) -> ArmRun:
    return next(iter(runs.values()))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def choose_values(sweep: Sweep, runs: Sequence[ArmRun], measurement: Measurement) -> SweepResults:
    """Return what dev prompts say of the values; what is measured already is not measured again.

    Every arm is measured by itself, for only tau decides, which others' company does not change.

    Args:
        sweep: the values.
        runs: of one seed, every arm with every value, all trained.
        measurement: on dev prompts.

    Raises:
        JakiroError: a measurement failed.
    """
    names = dict.fromkeys(run.arm for run in runs)
    documents = {
        name: measurement.of_values([run for run in runs if run.arm == name]) for name in names
    }
    return SweepResults(
        key=sweep.key,
        values=sweep.values,
        temperatures=measurement.temperatures,
        seed=runs[0].seed,
        prompts=max(one.prompts for one in documents.values()),
        arms=tuple(choose_value(name, sweep, one) for name, one in documents.items()),
    )


def choose_value(arm: str, sweep: Sweep, document: ComparisonDocument) -> ArmSweep:
    """Return what a document says of an arm; its methods are called as the values are."""
    temperatures = dict.fromkeys(one.temperature for one in document.methods)
    tau = [
        [document.figures(value_name(value), temperature).tau for value in sweep.values]
        for temperature in temperatures
    ]
    scores = [math.prod(column) ** (1 / len(column)) for column in zip(*tau, strict=True)]
    # The highest score, and of equal ones the smallest value.
    best = max(zip(scores, sweep.values, strict=True), key=lambda pair: (pair[0], -pair[1]))
    return ArmSweep(
        arm=arm,
        tau=tuple(map(tuple, tau)),
        score=tuple(scores),
        chosen=best[1],
    )
