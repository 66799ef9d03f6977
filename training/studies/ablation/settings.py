"""Settings of a study, and its prompts: test prompts for the results, dev prompts for a sweep."""

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, PositiveInt, model_validator

from inference.benchmark.settings import Temperatures
from inference.generation.prompt_file import BenchPrompt, distinct, prompt_of, read_prompts
from inference.generation.prompts import encode_prompt
from jakiro.errors import ConfigError
from jakiro.utils.files import write_atomically
from jakiro.utils.settings import Settings
from training.setup.preparation import RunInputs
from training.studies.ablation.runs import Launcher

FEWEST_PROMPTS = 2  # smallest number for which there is an interval over prompts


class StudySettings(Settings):
    """Arms of a study, and settings of their training and measurement.

    Attributes:
        base: YAML file of the base, with the settings of a training run.
        config: YAML files of the ablations, each with the settings that differ from the base.
        out: folder of runs and results.
        overrides: overrides `key.path=value`, merged into the base and thus into every arm.
        seeds: number of seeds with which every arm is trained.
        max_steps: largest number of optimizer steps of a run, which replaces a number of epochs;
            None for the number in the settings.
        any_size: whether arms that cannot be made as large as the base keep their own size.
        separately: whether each arm is measured in a process of its own.
        cell: name of the measurement and of the folder of its results inside `out`; None to write
            results into `out` itself.
        launcher: "inline" to train in this process, "deepspeed" to train on all devices of this
            machine.
        sweep: setting and values to try, as `key.path=VALUE,VALUE,...`; every arm gets its best
            value. None for no sweep.
        dev_prompts: prompt file of the sweep, which must not contain test prompts.
        dev_num_prompts: largest number of dev prompts; None for `num_prompts`.
        prompts: prompt file of `jakiro bench`; None for the beginnings of validation documents.
        num_prompts: largest number of prompts.
        max_new_tokens: largest number of new tokens for each prompt.
        temperatures: sampling temperatures; 0 is greedy decoding.
        candidates: number of nodes of a draft tree, the same for all arms.
        trees: kinds of trees, each written as the options of a drafter in `jakiro bench`; empty
            for the default trees with `candidates` nodes.
        repeats: number of times that each prompt is decoded.
    """

    base: Path
    config: tuple[Path, ...] = Field(min_length=1)
    out: Path
    overrides: tuple[str, ...] = ()
    seeds: PositiveInt = 3
    max_steps: PositiveInt | None = None
    any_size: bool = False
    separately: bool = False
    cell: str | None = Field(None, pattern=r"^\w[\w.-]*$")
    launcher: Launcher = "inline"
    sweep: str | None = None
    dev_prompts: Path | None = None
    dev_num_prompts: PositiveInt | None = None
    prompts: Path | None = None
    num_prompts: int = Field(40, ge=FEWEST_PROMPTS)
    max_new_tokens: PositiveInt = 64
    temperatures: Temperatures = (0.0, 1.0)
    candidates: PositiveInt = 8
    trees: tuple[str, ...] = ()
    repeats: PositiveInt = 1

    @property
    def num_dev_prompts(self) -> int:
        """The largest number of dev prompts."""
        return self.dev_num_prompts or self.num_prompts

    @model_validator(mode="after")
    def _sweeps_have_prompts(self) -> "StudySettings":
        if (self.sweep is None) != (self.dev_prompts is None):
            raise ValueError("--sweep and --dev-prompts must be set together")
        if self.dev_num_prompts is not None and self.sweep is None:
            raise ValueError("--dev-num-prompts needs --sweep and --dev-prompts")
        return self


class StudyPrompts:
    """The prompts of a study, which are checked before any training.

    Args:
        inputs: inputs of the study, whose prompts are the beginnings of validation documents.
        test: file of the test prompts; None for the prompts of `inputs`.
        dev: file of the dev prompts; None if there is no sweep.

    Raises:
        PromptError: a file cannot be used.
        ConfigError: there are too few prompts, or a dev prompt is also a test prompt.
    """

    def __init__(self, inputs: RunInputs, test: Path | None, dev: Path | None) -> None:
        self._inputs = inputs
        self._test = test
        found = self._test_prompts()
        if len(found) < FEWEST_PROMPTS:
            raise ConfigError(
                "there are too few prompts to measure on",
                expected=f"at least {FEWEST_PROMPTS} different prompts",
                got=len(found),
                remedy="pass more prompts with --prompts FILE, or --set data.validation_size=N",
            )
        if dev is not None:
            self._require_apart(distinct(read_prompts(dev)), found, dev)

    def test_file(self, folder: Path) -> Path:
        """Return the file of the test prompts, which is written into `folder` if none was given."""
        if self._test is not None:
            return self._test
        path = folder / "prompts.jsonl"
        lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in self._inputs.prompts]
        write_atomically(path, "".join(lines))
        return path

    def _test_prompts(self) -> list[BenchPrompt]:
        if self._test is not None:
            return distinct(read_prompts(self._test))
        return distinct(map(prompt_of, self._inputs.prompts))

    def _require_apart(
        self, dev: Sequence[BenchPrompt], test: Sequence[BenchPrompt], path: Path
    ) -> None:
        reported = {self._tokens(prompt) for prompt in test}
        shared = sum(self._tokens(prompt) in reported for prompt in dev)
        if shared:
            raise ConfigError(
                f"{path} contains test prompts",
                expected="dev prompts that are not test prompts",
                got=f"{shared} of {len(dev)} dev prompts are test prompts",
                remedy="remove the shared prompts from the dev prompts or from the test prompts",
            )

    def _tokens(self, prompt: BenchPrompt) -> tuple[int, ...]:
        """Return the token ids of a prompt, or of the first turn if the prompt is a dialogue."""
        vocab_size = self._inputs.target.spec.vocab_size
        return tuple(encode_prompt(prompt.first, self._inputs.tokenizer, vocab_size))
