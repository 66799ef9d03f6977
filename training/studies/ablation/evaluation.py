"""Measurement of arms by `jakiro bench` in a separate process, and choice of a sweep's values."""

import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from inference.benchmark.document import ComparisonDocument, read_document
from inference.benchmark.method_names import AUTOREGRESSIVE, DRAFTER
from jakiro.errors import ConfigError, JakiroError
from jakiro.utils.dtype_names import dtype_name
from jakiro.utils.files import checksum, ensure_writable_folder, fingerprint, write_atomically
from jakiro.utils.pretrained import TORCH_DTYPES
from jakiro.utils.settings import Settings
from training.loop.run_fingerprint import difference, run_fingerprint
from training.studies.ablation.results import ArmSweep, SweepResults
from training.studies.ablation.runs import ArmRun, MeasuredRun
from training.studies.ablation.sweep import Sweep, value_name
from training.studies.ablation.trees import Trees, trees_key


class MeasurementInputs(Settings):
    """The inputs of a stored measurement.

    Attributes:
        key: hash of everything that determines the figures, except for the machine.
        runs: the measured runs by the names of their methods.
    """

    key: str
    runs: dict[str, MeasuredRun]


@dataclass(frozen=True)
class Measurement:
    """Settings of a measurement, the same for all arms.

    Attributes:
        prompts: prompt file of `jakiro bench`.
        num_prompts: largest number of prompts.
        max_new_tokens: largest number of new tokens for each prompt.
        temperatures: sampling temperatures; 0 is greedy decoding.
        trees: kinds of trees; every arm is measured with each kind.
        repeats: number of times that each prompt is decoded.
        folder: folder of the results.
        facts: fingerprints of the target, of the data and, if there is one, of the start drafter,
            by the names of the arms.
    """

    prompts: Path
    num_prompts: int
    max_new_tokens: int
    temperatures: tuple[float, ...]
    trees: tuple[Trees, ...]
    repeats: int
    folder: Path
    facts: Mapping[str, Mapping[str, str]]

    def of_seed(self, runs: Sequence[ArmRun]) -> ComparisonDocument:
        """Return the figures of all arms with one seed, and of autoregressive decoding.

        The timings are interleaved, so that speeds can be compared. Stored results are reused
        unless an arm was trained again or the settings of the measurement have changed.

        Args:
            runs: finished runs of one seed.

        Raises:
            JakiroError: the measurement failed.
        """
        return self._of({run.arm: run for run in runs}, [AUTOREGRESSIVE], f"seed-{runs[0].seed}")

    def of_arms(self, runs: Sequence[ArmRun]) -> ComparisonDocument:
        """Return the figures of `of_seed`, with each arm measured in a process of its own.

        After an interruption, only the remaining arms are measured. Speeds are those of different
        times, so that other programs on the machine affect their ratios.

        Args:
            runs: finished runs of one seed.

        Raises:
            JakiroError: a measurement failed.
        """
        first, *others = (
            self._of({run.arm: run}, [] if number else [AUTOREGRESSIVE], _name(run))
            for number, run in enumerate(runs)
        )
        methods = (method for document in (first, *others) for method in document.methods)
        return first.model_copy(update={"methods": tuple(methods)})

    def recalled(self, run: ArmRun) -> ArmRun:
        """Return a run whose drafter is missing, with the facts of its stored measurement.

        The run must have been measured separately, maybe on another machine. If there is no such
        measurement, or if the drafter is there, return the run unchanged.

        Args:
            run: a run, which may be unfinished.

        Raises:
            ConfigError: a drafter with other settings was measured.
        """
        name = _name(run)
        stored = self._stored_inputs(name)
        if run.folder.is_finished or stored is None:
            return run
        known = replace(run, measured=stored.runs[run.arm])
        if self._key({run.arm: known}) != stored.key:
            return run
        before = stored.runs[run.arm].fingerprint(str(self._inputs_file(name)))
        found = difference(before, run_fingerprint(run.settings, self.facts[run.arm]))
        if found is not None:
            setting, then, now = found
            raise ConfigError(
                f"the results in {self._document(name)} are those of a drafter with other "
                f"settings ({setting} differs)",
                expected=then,
                got=now,
                remedy="choose another --out, or delete this file to train and measure the arm "
                "again",
            )
        return known

    def of_values(self, runs: Sequence[ArmRun]) -> ComparisonDocument:
        """Return the figures of one arm, with one method per swept value, named after the value.

        The arm is measured in the same way as in `of_seed`, but without autoregressive decoding.

        Args:
            runs: finished runs of one arm and seed.

        Raises:
            JakiroError: the measurement failed.
        """
        by_value = {value_name(run.value): run for run in runs if run.value is not None}
        return self._of(by_value, [], f"{runs[0].arm}-seed-{runs[0].seed}")

    def _of(
        self, runs: Mapping[str, ArmRun], others: Sequence[str], name: str
    ) -> ComparisonDocument:
        ensure_writable_folder(self.folder)
        path, stored = self._document(name), self._stored_inputs(name)
        if stored is None or stored.key != self._key(runs):
            # An interrupted measurement leaves a partial document, but no inputs.
            self._inputs_file(name).unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            self._measure(runs, others, path)
            text = self._inputs(runs).model_dump_json(indent=1)
            write_atomically(self._inputs_file(name), text + "\n")
        return read_document(path)

    def _document(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _inputs_file(self, name: str) -> Path:
        return self.folder / f"{name}.inputs.json"

    def _stored_inputs(self, name: str) -> MeasurementInputs | None:
        """Return the inputs of a measurement; None unless the measurement is stored."""
        path = self._inputs_file(name)
        if not (path.exists() and self._document(name).exists()):
            return None
        return MeasurementInputs.model_validate_json(path.read_text())

    def _inputs(self, runs: Mapping[str, ArmRun]) -> MeasurementInputs:
        known = {
            name: run.measured
            or MeasuredRun(weights=run.weights, facts=dict(self.facts[run.arm]), record=run.record)
            for name, run in runs.items()
        }
        return MeasurementInputs(key=self._key(runs), runs=known)

    def _key(self, runs: Mapping[str, ArmRun]) -> str:
        """Return a hash of everything that determines the figures, except for the machine."""
        settings = _first(runs).settings
        target = settings.target
        return fingerprint(
            checksum(self.prompts),
            [self.num_prompts, self.max_new_tokens, self.temperatures, self.repeats],
            [target.name_or_path, target.dtype, settings.engine.device, trees_key(self.trees)],
            [[name, run.weights] for name, run in runs.items()],
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
                remedy=f"see the messages above, or repeat the command: {' '.join(command)}",
            )

    def _options(self, runs: Mapping[str, ArmRun], others: Sequence[str], path: Path) -> list[str]:
        first = _first(runs)
        options = {
            "--target": first.settings.target.name_or_path,
            "--dtype": dtype_name(TORCH_DTYPES[first.settings.target.dtype]),
            "--device": first.settings.engine.device,
            "--prompts": str(self.prompts),
            "--num-prompts": str(self.num_prompts),
            "--max-new-tokens": str(self.max_new_tokens),
            "--repeats": str(self.repeats),
            "--seed": str(first.seed),
            "--json": str(path),
        }
        repeated = [("--method", method) for method in (*others, *self._methods(runs))]
        repeated += [("--temperature", repr(value)) for value in self.temperatures]
        return [word for pair in (*options.items(), *repeated) for word in pair]

    def _methods(self, runs: Mapping[str, ArmRun]) -> list[str]:
        return [
            f"{DRAFTER}={run.folder.drafter},{trees.options},name={trees.method(name)}"
            for name, run in runs.items()
            for trees in self.trees
        ]


def _name(run: ArmRun) -> str:
    return f"{run.arm}-{run.seed}"


def _first(runs: Mapping[str, ArmRun]) -> ArmRun:
    return next(iter(runs.values()))


def select_values(sweep: Sweep, runs: Sequence[ArmRun], measurement: Measurement) -> SweepResults:
    """Measure all values of a sweep on dev prompts, and select the best value of every arm.

    Dev prompts are used only for this selection. Stored results are reused. Every arm is measured
    separately, which is possible because tau, unlike speed, needs no interleaved timings.

    Args:
        sweep: setting with its values.
        runs: finished runs of every arm with every value, all with the same seed.
        measurement: measurement on dev prompts.

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
        prompts=max(document.prompts for document in documents.values()),
        arms=tuple(select_value(name, sweep, document) for name, document in documents.items()),
    )


def select_value(arm: str, sweep: Sweep, document: ComparisonDocument) -> ArmSweep:
    """Return the results of a sweep for one arm, with the selected value.

    Args:
        arm: name of the arm.
        sweep: setting with its values.
        document: figures of the arm, with one method for each value, named after the value.
    """
    temperatures = dict.fromkeys(method.temperature for method in document.methods)
    tau = [
        [document.figures(value_name(value), temperature).tau for value in sweep.values]
        for temperature in temperatures
    ]
    scores = [math.prod(column) ** (1 / len(column)) for column in zip(*tau, strict=True)]
    # The value with the highest score is selected; of values with equal scores, the smallest.
    best = max(zip(scores, sweep.values, strict=True), key=lambda pair: (pair[0], -pair[1]))
    return ArmSweep(
        arm=arm,
        tau=tuple(map(tuple, tau)),
        score=tuple(scores),
        chosen=best[1],
    )
