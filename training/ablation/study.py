"""A study: training of all arms, measurement, analysis, and result files."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from inference.benchmark.document import ComparisonDocument, read_document
from inference.benchmark.settings import AUTOREGRESSIVE, DRAFTER
from inference.generation.prompt_file import distinct, prompt_of, read_prompts
from jakiro.errors import ConfigError, JakiroError
from jakiro.utils.files import checksum, ensure_writable_folder, fingerprint, write_atomically
from jakiro.utils.logs import get_logger
from jakiro.utils.provenance import provenance
from training.ablation.analysis import StudyResults, analyse, render
from training.ablation.arms import Arm, equalize_sizes, read_arms
from training.ablation.settings import FEWEST_PROMPTS, StudySettings
from training.config import TrainSettings
from training.loop.run_folder import RunFolder
from training.planning.estimate import duration_text, estimate, product_rate, size_text
from training.setup.preparation import check_arm, load_model, load_tokenizer, prepare
from training.train import train

_logger = get_logger(__name__)


@dataclass(frozen=True)
class ArmRun:
    """A training run of one arm with one seed."""

    arm: str
    seed: int
    settings: TrainSettings

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.settings.run_folder)


def runs_of(arms: Sequence[Arm], num_seeds: int, folder: Path) -> list[ArmRun]:
    """Return the runs of every arm with every seed, seed by seed.

    Arms with the same seed read the same sequences in the same order.
    """
    runs, first = [], arms[0].settings.seed
    for seed in range(first, first + num_seeds):
        for arm in arms:
            settings = arm.settings
            changes: dict[str, Any] = {
                "seed": seed,
                "run_folder": folder / "runs" / arm.name / f"seed-{seed}",
                # The study measures decoding itself, with interleaved timings.
                "evaluation": settings.evaluation.model_copy(
                    update={"num_prompts": 0, "every": None}
                ),
                # With one evaluation, `best` would be a copy of the finished drafter.
                "checkpoint": settings.checkpoint.model_copy(
                    update={"keep": 1, "keep_best": False}
                ),
            }
            runs.append(ArmRun(arm.name, seed, settings.model_copy(update=changes)))
    return runs


def measure(
    runs: Sequence[ArmRun], study: StudySettings, prompts: Path, folder: Path
) -> ComparisonDocument:
    """Return the figures of all arms with one seed, and of autoregressive decoding.

    The timings are interleaved, so that speeds can be compared. Stored results are reused unless an
    arm was trained again or the settings of the measurement have changed. `jakiro bench` measures
    in a process that does not hold the memory of the trainings.
    """
    seed = runs[0].seed
    path = ensure_writable_folder(folder) / f"seed-{seed}.json"
    stored, key = path.with_suffix(".key"), _key(runs, study, prompts)
    if not (path.exists() and stored.exists() and stored.read_text() == key):
        # An interrupted measurement leaves a partial document, but no key.
        stored.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        words = _bench_command(runs, study, prompts, path)
        code = subprocess.run(words, check=False, stdout=subprocess.DEVNULL).returncode
        if code or not path.exists():
            raise JakiroError(
                f"measuring the arms with seed {seed} failed with exit code {code}; see the "
                f"messages above, or repeat the command: {' '.join(words)}"
            )
        write_atomically(stored, key)
    return read_document(path)


def _key(runs: Sequence[ArmRun], study: StudySettings, prompts: Path) -> str:
    """Return a hash of everything that determines the figures, except for the machine."""
    target = runs[0].settings.target
    return fingerprint(
        checksum(prompts),
        [study.num_prompts, study.max_new_tokens, study.temperatures, study.repeats, study.trees],
        [target.name_or_path, target.dtype, runs[0].settings.engine.device],
        [[run.arm, checksum(run.folder.drafter / "model.safetensors")] for run in runs],
    )


def _bench_command(
    runs: Sequence[ArmRun], study: StudySettings, prompts: Path, path: Path
) -> list[str]:
    target = runs[0].settings.target
    options = [
        ("--target", target.name_or_path),
        ("--dtype", target.dtype),
        ("--device", runs[0].settings.engine.device),
        ("--prompts", str(prompts)),
        ("--num-prompts", str(study.num_prompts)),
        ("--max-new-tokens", str(study.max_new_tokens)),
        ("--repeats", str(study.repeats)),
        ("--seed", str(runs[0].seed)),
        ("--json", str(path)),
        ("--method", AUTOREGRESSIVE),
    ]
    for run in runs:
        options.append(("--method", f"{DRAFTER}={run.folder.drafter},{study.trees},name={run.arm}"))
    options += [("--temperature", repr(value)) for value in study.temperatures]
    return [sys.executable, "-m", "jakiro", "bench", *(word for pair in options for word in pair)]


class Study:
    """A study of several arms, which are variants of one training run."""

    def __init__(self, settings: StudySettings) -> None:
        self.settings = settings
        self.folder = settings.out.expanduser()
        arms = read_arms(settings.base, settings.config, settings.overrides, settings.max_steps)
        base = arms[0].settings
        model, tokenizer = load_model(base.target), load_tokenizer(base.target)
        # Without a file, the prompts are the beginnings of validation documents.
        count = 0 if settings.prompts else settings.num_prompts
        changes = {"prompts": None, "num_prompts": count, "max_new_tokens": settings.max_new_tokens}
        evaluation = base.evaluation.model_copy(update=changes)
        self.inputs = prepare(base.model_copy(update={"evaluation": evaluation}), model, tokenizer)
        config = self.inputs.drafter_config
        self.arms = equalize_sizes(
            arms, config.target_record, any_size=settings.any_size, base_config=config
        )
        for arm in self.arms:
            _logger.info(_size_of(arm))
        self.facts = {  # all arms share the other inputs
            arm.name: check_arm(arm.settings, self.inputs) for arm in self.arms
        }
        self.runs = runs_of(self.arms, settings.seeds, self.folder)
        if settings.prompts is None:
            num_prompts = len(distinct(map(prompt_of, self.inputs.prompts)))
        else:
            num_prompts = len(distinct(read_prompts(settings.prompts)))
        if num_prompts < FEWEST_PROMPTS:
            raise ConfigError(
                "there are too few prompts to measure on",
                expected=f"at least {FEWEST_PROMPTS} different prompts",
                got=num_prompts,
                remedy="pass more prompts with --prompts FILE, or --set data.validation_size=N",
            )

    def estimate(self) -> None:
        """Print the estimated time and disk space of all trainings on a device of this machine."""
        rate = product_rate(self.arms[0].settings)
        minutes, disk = 0.0, 0
        for arm in self.arms:
            run = estimate(arm.settings, num_processes=1)
            minutes += run.minutes(rate)
            disk += run.disk_bytes
        seeds = self.settings.seeds
        Console().print(
            f"training {len(self.arms)} arms with {seeds} seeds takes at least "
            f"{duration_text(seeds * minutes)} and {size_text(seeds * disk)} on disk",
            highlight=False,
        )

    def train(self, names: Sequence[str] = ()) -> None:
        """Train unfinished runs; several processes may train different arms at the same time."""
        all_names = [arm.name for arm in self.arms]
        if unknown := set(names) - set(all_names):
            raise ConfigError(f"there is no arm {', '.join(unknown)}; arms: {', '.join(all_names)}")
        ensure_writable_folder(self.folder)
        for run in self.runs:  # checks that are done before any training
            run.folder.check(run.settings, self.facts[run.arm])
        runs = [run for run in self.runs if run.arm in (names or all_names)]
        model, tokenizer = self.inputs.target.model, self.inputs.tokenizer
        for number, run in enumerate(runs, start=1):
            if run.folder.is_finished:
                continue
            _logger.info(f"run {number} of {len(runs)}: {run.arm}, seed {run.seed}")
            train(run.settings, model=model, tokenizer=tokenizer)

    def complete(self) -> StudyResults:
        """Finish all training runs and measurements, and write the results."""
        self.train()
        folder = ensure_writable_folder(self.folder / (self.settings.cell or ""))
        prompts = self.settings.prompts
        if prompts is None:
            prompts = folder / "prompts.jsonl"
            lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in self.inputs.prompts]
            write_atomically(prompts, "".join(lines))
        documents = {
            seed: measure(
                [run for run in self.runs if run.seed == seed],
                self.settings,
                prompts,
                folder / "measurements",
            )
            for seed in dict.fromkeys(run.seed for run in self.runs)
        }
        results = analyse(documents, self.arms)
        console = Console(record=True)
        facts = {"settings": self.settings.model_dump(mode="json"), "provenance": provenance()}
        write_atomically(folder / "results.json", results.model_dump_json(indent=1) + "\n")
        write_atomically(folder / "study.json", json.dumps(facts, indent=1))
        for part in render(results):
            console.print(part, highlight=False)
        write_atomically(folder / "results.txt", console.export_text())
        return results


def _size_of(arm: Arm) -> str:
    width = f"experts of width {arm.width}"
    if arm.width != arm.width_before:
        width += f" instead of {arm.width_before}, so that the arm is as large as the base"
    return f"{arm.name}: {arm.parameters:,} parameters, {width}"
