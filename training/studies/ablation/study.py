"""A study: training of all arms, measurement, analysis, and result files."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from inference.benchmark.document import ComparisonDocument
from jakiro.errors import ConfigError
from jakiro.utils.files import ensure_writable_folder, write_atomically
from jakiro.utils.logs import get_logger
from jakiro.utils.progress import ProgressDisplay
from jakiro.utils.provenance import provenance
from jakiro.utils.wording import counted
from training.config import TrainSettings
from training.setup.loading import load_model, load_tokenizer
from training.setup.preparation import check_arm, prepare
from training.studies.ablation.analysis import ArmFacts, analyse
from training.studies.ablation.arms import SizedArm, equally_sized, read_arms
from training.studies.ablation.estimate import ArmEstimate, estimate, render
from training.studies.ablation.evaluation import Measurement, select_values
from training.studies.ablation.plot import plot
from training.studies.ablation.results import StudyResults, SweepResults
from training.studies.ablation.runs import ArmRun, forget, runs_of, train_runs
from training.studies.ablation.settings import StudyPrompts, StudySettings
from training.studies.ablation.sweep import parse_sweep
from training.studies.ablation.tables import in_words, to_csv, to_markdown, to_terminal
from training.studies.ablation.trees import Trees, parse_trees

_logger = get_logger(__name__)

_MEASUREMENTS = "measurements"  # folder


class Study:
    """A study of several arms, which are variants of one training run.

    Args:
        settings: settings of the study.

    Raises:
        ConfigError: the arms cannot be compared, or there are too few prompts to measure them on.
        JakiroError: the target, the data or the prompts cannot be used.
    """

    def __init__(self, settings: StudySettings) -> None:
        self.settings = settings
        self.folder = settings.out.expanduser()
        self.results_folder = self.folder / (settings.cell or "")
        arms = read_arms(settings.base, settings.config, settings.overrides, settings.max_steps)
        base = arms[0].settings
        model, tokenizer = load_model(base.target), load_tokenizer(base.target)
        self.trees = parse_trees(settings.trees, settings.candidates)
        own = 0 if settings.prompts else settings.num_prompts
        with_prompts = _with_prompts(base, own, settings.max_new_tokens)
        self.inputs = prepare(with_prompts, model, tokenizer)
        config = self.inputs.drafter_config
        self.arms = equally_sized(
            arms, config.target_record, any_size=settings.any_size, base_config=config
        )
        for arm in self.arms:
            _logger.info(_size_of(arm))
        self.facts = {  # all arms share the other inputs
            arm.name: check_arm(arm.arm.settings, self.inputs) for arm in self.arms
        }
        self.sweep = None if settings.sweep is None else parse_sweep(settings.sweep, self.arms)
        self.runs = runs_of(self.arms, settings.seeds, self.folder, self.sweep)
        self.prompts = StudyPrompts(self.inputs, settings.prompts, settings.dev_prompts)

    def estimate(self) -> None:
        """Print the estimated time and disk space of the study, without writing any file."""
        settings = self.settings
        per_prompt = settings.max_new_tokens * len(settings.temperatures) * settings.repeats
        num_values = 0 if self.sweep is None else len(self.sweep.values)
        _logger.info(f"timing decoding and an optimizer step of each of {len(self.arms)} arms")
        with ProgressDisplay() as progress:
            task = progress.add_task("Timing a step of each arm", total=len(self.arms))
            estimates = self._estimates(per_prompt, num_values, partial(progress.advance, task))
        console = Console()
        console.print(render(estimates))
        console.print(
            f"training: {counted(settings.seeds, 'seed')}; measuring, of every arm and seed: "
            f"{settings.num_prompts} prompts x {settings.max_new_tokens} tokens x "
            f"{counted(len(settings.temperatures), 'temperature')} x "
            f"{counted(settings.repeats, 'repeat')} x {counted(len(self.trees), 'kind')} of trees, "
            "at the speed of decoding without a drafter",
            highlight=False,
        )

    def _estimates(
        self, per_prompt: int, num_values: int, advance: Callable[[], None]
    ) -> list[ArmEstimate]:
        settings = self.settings
        return estimate(
            self.arms,
            self.inputs,
            seeds=settings.seeds,
            evaluation_tokens=settings.num_prompts * per_prompt * len(self.trees),
            # The sweep's run with the selected value is also the arm's run with the first seed.
            sweep_runs=max(0, num_values - 1),
            sweep_tokens=num_values * settings.num_dev_prompts * per_prompt,
            advance=advance,
        )

    def complete(self, rerun: str | None = None) -> StudyResults:
        """Finish all training runs and measurements, and write the results.

        Args:
            rerun: name of an arm to be trained again; None for no arm.

        Raises:
            JakiroError: a run or a measurement failed.
        """
        names = [arm.name for arm in self.arms]
        if self.settings.separately and self.sweep is None:
            results = self._one_by_one(self._checked(rerun))
        else:
            runs, sweep = self._trained(names, rerun)
            measurement = self._test_measurement()
            separately = self.settings.separately
            measure = measurement.of_arms if separately else measurement.of_seed
            results = self._analysed(runs, measure).model_copy(update={"sweep": sweep})
            self._write(results)
        Console().print(to_terminal(results))
        return results

    def _one_by_one(self, runs: Sequence[ArmRun]) -> StudyResults:
        """Train, measure and store one arm after the other, and return the results of all."""
        measurement = self._test_measurement()
        runs = [measurement.recalled(run) for run in runs]
        for number, arm in enumerate(self.arms, start=1):
            _logger.info(f"arm {number} of {len(self.arms)}: {arm.name}")
            self._train([run for run in runs if run.arm == arm.name])
            names = {before.name for before in self.arms[:number]}
            so_far = [run for run in runs if run.arm in names]
            results = self._analysed(so_far, measurement.of_arms)
            self._write(results)
            for row in results.of_arm(arm.name).rows:
                _logger.info(in_words(row))
        return results

    def _analysed(
        self,
        runs: Sequence[ArmRun],
        measure: Callable[[Sequence[ArmRun]], ComparisonDocument],
    ) -> StudyResults:
        """Measure finished runs, and return the results of their arms."""
        documents = {
            seed: measure([run for run in runs if run.seed == seed])
            for seed in sorted({run.seed for run in runs})
        }
        by_arm = [(arm, [run for run in runs if run.arm == arm.name]) for arm in self.arms]
        facts = [_facts(arm, own) for arm, own in by_arm if own]
        is_interleaved = not self.settings.separately
        return analyse(documents, facts, self.trees, is_interleaved=is_interleaved)

    def _test_measurement(self) -> Measurement:
        folder, settings = ensure_writable_folder(self.results_folder), self.settings
        prompts = self.prompts.test_file(folder)
        return self._measurement(prompts, settings.num_prompts, self.trees, folder / _MEASUREMENTS)

    def train(self, names: Sequence[str], rerun: str | None = None) -> None:
        """Train the given arms as in `complete`, but do not measure them on test prompts.

        Several processes may train different arms at the same time.

        Args:
            names: names of the arms.
            rerun: name of an arm to be trained again; None for no arm.

        Raises:
            ConfigError: an arm does not exist, another process is training it, or `rerun` is not
                among the names.
            JakiroError: a run failed, or a measurement on dev prompts failed.
        """
        if rerun is not None and rerun not in names:
            raise ConfigError(
                "the arm to be trained again is not among those to be trained",
                expected=f"--rerun with one of {', '.join(names)}",
                got=rerun,
                remedy=f"leave out --rerun, or add --train-only {rerun}",
            )
        for name in names:
            self._require_arm(name, "there is no such arm to train")
        self._trained(names, rerun)

    def _trained(
        self, names: Sequence[str], rerun: str | None
    ) -> tuple[list[ArmRun], SweepResults | None]:
        """Train the arms with all seeds, and return their runs and the results of the sweep."""
        runs = [run for run in self._checked(rerun) if run.arm in names]
        if self.sweep is None:
            self._train(runs)
            return runs, None
        first = [run for run in runs if run.seed == self.runs[0].seed]
        self._train(first)
        selected = select_values(self.sweep, first, self._dev_measurement())
        runs = [run for run in runs if run.value == selected.value_of(run.arm)]
        self._train(runs)
        return runs, selected

    def _checked(self, rerun: str | None) -> list[ArmRun]:
        """Return all runs, which are checked before any training; forget one arm to train again."""
        ensure_writable_folder(self.folder)
        if rerun is not None:
            self._require_arm(rerun, "there is no such arm to run again")
            forget(self.runs, rerun, self.folder)
        for run in self.runs:
            run.folder.check(run.settings, self.facts[run.arm])
        return self.runs

    def _train(self, runs: Sequence[ArmRun]) -> None:
        model, tokenizer = self.inputs.target.model, self.inputs.tokenizer
        train_runs(runs, self.settings.launcher, model, tokenizer)

    def _require_arm(self, name: str, message: str) -> None:
        names = [arm.name for arm in self.arms]
        if name not in names:
            raise ConfigError(message, expected=f"one of {', '.join(names)}", got=name)

    def _dev_measurement(self) -> Measurement:
        settings, folder = self.settings, self.folder / _MEASUREMENTS / "dev"
        assert settings.dev_prompts is not None
        trees = parse_trees((), settings.candidates)
        return self._measurement(settings.dev_prompts, settings.num_dev_prompts, trees, folder)

    def _measurement(
        self, prompts: Path, num_prompts: int, trees: tuple[Trees, ...], folder: Path
    ) -> Measurement:
        return Measurement(
            prompts=prompts,
            num_prompts=num_prompts,
            max_new_tokens=self.settings.max_new_tokens,
            temperatures=self.settings.temperatures,
            trees=trees,
            repeats=self.settings.repeats,
            folder=folder,
            facts=self.facts,
        )

    def _write(self, results: StudyResults) -> None:
        """Store the results in all formats."""
        texts = {
            "results.json": results.model_dump_json(indent=1) + "\n",
            "results.csv": to_csv(results),
            "results.md": to_markdown(results),
            "study.json": json.dumps(
                {"settings": self.settings.model_dump(mode="json"), "provenance": provenance()},
                indent=1,
            ),
        }
        arms = ensure_writable_folder(self.results_folder / "arms")
        for name in dict.fromkeys(row.arm for row in results.rows):
            text = results.of_arm(name).model_dump_json(indent=1)
            write_atomically(arms / f"{name}.json", text + "\n")
        for name, text in texts.items():
            write_atomically(self.results_folder / name, text)
        plot(results, self.results_folder / "results.png")


def _with_prompts(base: TrainSettings, count: int, max_new_tokens: int) -> TrainSettings:
    """Return the base's settings, with `count` prompts from validation data."""
    changes = {"prompts": None, "num_prompts": count, "max_new_tokens": max_new_tokens}
    return base.model_copy(update={"evaluation": base.evaluation.model_copy(update=changes)})


def _facts(sized: SizedArm, runs: Sequence[ArmRun]) -> ArmFacts:
    agreements = [run.validation_agreement for run in runs]
    return ArmFacts(
        name=sized.name,
        settings=sized.arm.settings,
        parameters=sized.parameters,
        training_tokens=tuple(run.training_tokens for run in runs),
        validation_agreement=tuple(value for value in agreements if value is not None),
        experts=tuple(run.experts for run in runs if run.experts is not None),
    )


def _size_of(arm: SizedArm) -> str:
    width = f"experts of width {arm.width}"
    if arm.width != arm.width_before:
        width += f" instead of {arm.width_before}, so that the arm is as large as the base"
    return f"{arm.name}: {arm.parameters:,} parameters, {width}"
