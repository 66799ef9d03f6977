"""A study: training of all arms, measurement, analysis, and result files."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from inference.generation.prompt_file import distinct, prompt_of, read_prompts
from jakiro.errors import ConfigError
from jakiro.utils.files import ensure_writable_folder, write_atomically
from jakiro.utils.logs import get_logger
from jakiro.utils.provenance import provenance
from training.planning.estimate import duration_text, estimate, product_rate, size_text
from training.setup.loading import load_model, load_tokenizer
from training.setup.preparation import check_arm, prepare
from training.studies.ablation.analysis import analyse
from training.studies.ablation.arms import Arm, equally_sized, read_arms
from training.studies.ablation.evaluation import measure
from training.studies.ablation.results import StudyResults
from training.studies.ablation.runs import runs_of, train_runs
from training.studies.ablation.settings import FEWEST_PROMPTS, StudySettings
from training.studies.ablation.tables import to_markdown

_logger = get_logger(__name__)


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
        self.arms = equally_sized(
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
        """Print the estimated time and disk space of all trainings on one device of this machine.

        Measuring the arms takes additional time.
        """
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
        known = [arm.name for arm in self.arms]
        if unknown := set(names) - set(known):
            raise ConfigError(f"there is no arm {', '.join(unknown)}; arms: {', '.join(known)}")
        ensure_writable_folder(self.folder)
        for run in self.runs:  # checks that are done before any training
            run.folder.check(run.settings, self.facts[run.arm])
        runs = [run for run in self.runs if run.arm in (names or known)]
        train_runs(runs, self.settings.launcher, self.inputs.target.model, self.inputs.tokenizer)

    def complete(self) -> StudyResults:
        """Finish all training runs and measurements, and write the results."""
        self.train()
        folder = ensure_writable_folder(self.folder / (self.settings.cell or ""))
        prompts = self.settings.prompts or self._write_prompts(folder / "prompts.jsonl")
        documents = {
            seed: measure(
                [run for run in self.runs if run.seed == seed],
                self.settings,
                prompts,
                folder / "measurements",
            )
            for seed in dict.fromkeys(run.seed for run in self.runs)
        }
        arms = [
            replace(arm, records=tuple(run.record for run in self.runs if run.arm == arm.name))
            for arm in self.arms
        ]
        results = analyse(documents, arms)
        table = to_markdown(results)
        facts = {"settings": self.settings.model_dump(mode="json"), "provenance": provenance()}
        write_atomically(folder / "results.json", results.model_dump_json(indent=1) + "\n")
        write_atomically(folder / "results.md", table)
        write_atomically(folder / "study.json", json.dumps(facts, indent=1))
        Console().print(Markdown(table))
        return results

    def _write_prompts(self, path: Path) -> Path:
        lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in self.inputs.prompts]
        write_atomically(path, "".join(lines))
        return path


def _size_of(arm: Arm) -> str:
    width = f"experts of width {arm.width}"
    if arm.width != arm.width_before:
        width += f" instead of {arm.width_before}, so that the arm is as large as the base"
    return f"{arm.name}: {arm.parameters:,} parameters, {width}"
