"""A study from its files to its table."""

import json
from pathlib import Path

from pydantic import Field, PositiveInt
from rich.console import Console

from inference.comparison.document import Temperatures
from inference.comparison.prompt_file import distinct, read_bench_prompts
from jakiro.errors import ConfigError
from jakiro.files import ensure_writable_folder, write_atomically
from jakiro.logs import get_logger
from jakiro.provenance import provenance
from jakiro.settings import Settings
from jakiro.target import TargetAdapter
from jakiro.target_record import record_target
from training.ablation.analysis import ArmFacts, analyse
from training.ablation.arms import read_arms
from training.ablation.equal_size import SizedArm, equally_sized
from training.ablation.estimate import estimate, render
from training.ablation.evaluation import Measurement
from training.ablation.plot import plot
from training.ablation.results import StudyResults
from training.ablation.runs import Launcher, forget, runs_of, train_runs
from training.ablation.tables import to_csv, to_markdown, to_terminal
from training.config import TrainSettings
from training.initialization import check_initialization
from training.preparation import load_model, load_tokenizer, prepare

_FEWEST_PROMPTS = 2  # intervals are over prompts

_logger = get_logger(__name__)


class StudySettings(Settings):
    """What is studied, and how it is measured.

    Attributes:
        base: settings of a training run.
        config: the ablations, deltas on the base.
        out: folder of runs and results.
        overrides: `key.path=value`, laid over the base.
        seeds: runs of every arm.
        max_steps: cut the runs to so many steps.
        launcher: how runs are started.
        prompts: to measure on, as for `jakiro bench`; None for starts of held-out documents.
        num_prompts: at most so many of them.
        max_new_tokens: longest continuation.
        temperatures: 0 is greedy.
        candidates: nodes of a draft tree; the same for all arms.
        repeats: times that a prompt is decoded.
    """

    base: Path
    config: tuple[Path, ...] = Field(min_length=1)
    out: Path
    overrides: tuple[str, ...] = ()
    seeds: PositiveInt = 3
    max_steps: PositiveInt | None = None
    launcher: Launcher = "inline"
    prompts: Path | None = None
    num_prompts: int = Field(40, ge=_FEWEST_PROMPTS)
    max_new_tokens: PositiveInt = 64
    temperatures: Temperatures = (0.0, 1.0)
    candidates: PositiveInt = 8
    repeats: PositiveInt = 1


class Study:
    """Everything between the files and the table.

    Args:
        settings: what is studied.

    Raises:
        ConfigError: arms cannot be compared, or there is nothing to measure them on.
        JakiroError: target, data or prompts cannot be used.
    """

    def __init__(self, settings: StudySettings) -> None:
        self.settings = settings
        self.folder = settings.out.expanduser().absolute()
        arms = read_arms(settings.base, settings.config, settings.overrides, settings.max_steps)
        base = arms[0].settings
        model, tokenizer = load_model(base.target), load_tokenizer(base.target)
        spec = TargetAdapter(model.eval()).spec
        self.arms = equally_sized(arms, record_target(spec, base.target.name_or_path, tokenizer))
        for arm in self.arms:
            _logger.info(_size_of(arm))
        self.runs = runs_of(self.arms, settings.seeds, self.folder)
        self.inputs = prepare(_with_prompts(self.arms[0].arm.settings, settings), model, tokenizer)
        for arm in self.arms:  # the base's inputs serve all arms
            check_initialization(arm.arm.settings, self.inputs.target)
        self._check_prompts()

    def estimate(self) -> None:
        """Say what it would take; nothing is written."""
        tokens = self.settings.num_prompts * self.settings.max_new_tokens
        tokens *= len(self.settings.temperatures) * self.settings.repeats
        estimates = estimate(
            self.arms, self.inputs, seeds=self.settings.seeds, evaluation_tokens=tokens
        )
        Console().print(render(estimates))

    def complete(self, rerun: str | None = None) -> StudyResults:
        """Train what is not trained yet, measure what is not measured yet, and write the results.

        Args:
            rerun: an arm to be trained again.

        Raises:
            JakiroError: a run or a measurement failed.
        """
        ensure_writable_folder(self.folder)
        if rerun is not None:
            self._forget(rerun)
        for run in self.runs:  # before any work
            run.folder.check(run.settings, self.inputs.facts)
        train_runs(
            self.runs, self.settings.launcher, self.inputs.target.model, self.inputs.tokenizer
        )
        measurement = self._measurement()
        seeds = sorted({run.seed for run in self.runs})
        documents = {
            seed: measurement.of_seed([run for run in self.runs if run.seed == seed])
            for seed in seeds
        }
        results = analyse(documents, [self._facts(arm) for arm in self.arms])
        self._write(results)
        return results

    def _forget(self, arm: str) -> None:
        names = [one.name for one in self.arms]
        if arm not in names:
            raise ConfigError(
                "there is no such arm to run again", expected=f"one of {', '.join(names)}", got=arm
            )
        forget(self.runs, arm)

    def _check_prompts(self) -> None:
        given = self.settings.prompts
        found = self.inputs.prompts if given is None else distinct(read_bench_prompts(given))
        if len(found) < _FEWEST_PROMPTS:
            raise ConfigError(
                "there are too few prompts to measure on",
                expected=f"at least {_FEWEST_PROMPTS} different ones",
                got=len(found),
                remedy="give --prompts FILE, or hold documents out with --set data.held_out=N",
            )

    def _measurement(self) -> Measurement:
        settings = self.settings
        return Measurement(
            prompts=settings.prompts or self._own_prompts(),
            num_prompts=settings.num_prompts,
            max_new_tokens=settings.max_new_tokens,
            temperatures=settings.temperatures,
            candidates=settings.candidates,
            repeats=settings.repeats,
            folder=self.folder / "measurements",
        )

    def _own_prompts(self) -> Path:
        """Write down the starts of held-out documents, and return the file."""
        path = self.folder / "prompts.jsonl"
        rows = [json.dumps({"prompt": prompt}) + "\n" for prompt in self.inputs.prompts]
        write_atomically(path, "".join(rows))
        return path

    def _facts(self, sized: SizedArm) -> ArmFacts:
        runs = [run for run in self.runs if run.arm == sized.name]
        agreements = [run.held_out_agreement for run in runs]
        return ArmFacts(
            name=sized.name,
            settings=sized.arm.settings,
            parameters=sized.parameters,
            training_tokens=tuple(run.training_tokens for run in runs),
            held_out_agreement=tuple(one for one in agreements if one is not None),
        )

    def _write(self, results: StudyResults) -> None:
        """Store the results in every form, and print the table."""
        texts = {
            "results.json": results.model_dump_json(indent=1) + "\n",
            "results.csv": to_csv(results),
            "results.md": to_markdown(results),
            "study.json": json.dumps(
                {"settings": self.settings.model_dump(mode="json"), "provenance": provenance()},
                indent=1,
            ),
        }
        for name, text in texts.items():
            write_atomically(self.folder / name, text)
        plot(results, self.folder / "results.png")
        Console().print(to_terminal(results))


def _with_prompts(base: TrainSettings, settings: StudySettings) -> TrainSettings:
    """Return the base's settings with as many prompts of held-out documents as are measured on."""
    changes = {
        "num_prompts": 0 if settings.prompts else settings.num_prompts,
        "max_new_tokens": settings.max_new_tokens,
    }
    return base.model_copy(update={"evaluation": base.evaluation.model_copy(update=changes)})


def _size_of(arm: SizedArm) -> str:
    width = f"experts of width {arm.width}"
    if arm.width != arm.width_before:
        width += f" instead of {arm.width_before}, to be as large as the base"
    return f"{arm.name}: {arm.parameters:,} parameters, {width}"
