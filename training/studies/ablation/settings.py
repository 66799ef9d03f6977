"""The prompts of a study: those it reports on, and those that may choose settings."""

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, PositiveInt, model_validator

from inference.benchmark.document import Temperatures
from inference.generation.prompt_file import BenchPrompt, distinct, prompt_of, read_bench_prompts
from inference.generation.prompts import encode_prompt
from jakiro.errors import ConfigError
from jakiro.utils.files import write_atomically
from jakiro.utils.settings import Settings
from training.setup.preparation import Prepared
from training.studies.ablation.runs import Launcher

FEWEST_PROMPTS = 2  # intervals are over prompts


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
        sweep: `key.path=VALUE,VALUE,...`; every arm gets the value that is best for it.
        dev_prompts: that choose the value; none of them may be among the prompts.
        dev_num_prompts: at most so many of them; None for as many as there are prompts.
        prompts: to measure on, as for `jakiro bench`; None for starts of held-out rows of data.
        num_prompts: at most so many of them.
        max_new_tokens: longest continuation.
        temperatures: 0 is greedy.
        candidates: nodes of a draft tree; the same for all arms.
        trees: several kinds of trees, each as options of a drafter of `jakiro bench`; none for one
            kind, of so many candidates.
        repeats: times that a prompt is decoded.
    """

    base: Path
    config: tuple[Path, ...] = Field(min_length=1)
    out: Path
    overrides: tuple[str, ...] = ()
    seeds: PositiveInt = 3
    max_steps: PositiveInt | None = None
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
        """At most so many prompts choose a value."""
        return self.dev_num_prompts or self.num_prompts

    @model_validator(mode="after")
    def _sweeps_have_prompts(self) -> "StudySettings":
        if (self.sweep is None) != (self.dev_prompts is None):
            raise ValueError("--sweep and --dev-prompts together, or neither of them")
        if self.dev_num_prompts is not None and self.sweep is None:
            raise ValueError("--dev-num-prompts only beside --sweep and --dev-prompts")
        return self


class StudyPrompts:
    """Prompts that are checked before any work.

    Args:
        inputs: of the study; its prompts are starts of held-out rows of data.
        test: a prompt file to report on; None for the inputs' prompts.
        dev: a prompt file to choose settings on, if any are chosen.
        reserved: test prompts that are not reported on, for trees are chosen on them.

    Raises:
        PromptError: a file cannot be used.
        ConfigError: there are too few prompts, or a dev prompt is also a test prompt.
    """

    def __init__(
        self, inputs: Prepared, test: Path | None, dev: Path | None, reserved: int = 0
    ) -> None:
        self._inputs = inputs
        self._test = test
        found = self._test_prompts()
        if len(found) < FEWEST_PROMPTS + reserved:
            raise ConfigError(
                "there are too few prompts to measure on",
                expected=f"at least {FEWEST_PROMPTS + reserved} different ones",
                got=len(found),
                remedy="give --prompts FILE, or hold documents out with --set data.validation_size=N",
            )
        if dev is not None:
            self._require_apart(distinct(read_bench_prompts(dev)), found, dev)

    def test_file(self, folder: Path) -> Path:
        """Return the file to report on; starts of held-out rows of data are written down first."""
        if self._test is not None:
            return self._test
        path = folder / "prompts.jsonl"
        rows = [json.dumps({"prompt": prompt}) + "\n" for prompt in self._inputs.prompts]
        write_atomically(path, "".join(rows))
        return path

    def _test_prompts(self) -> list[BenchPrompt]:
        if self._test is not None:
            return distinct(read_bench_prompts(self._test))
        return distinct(map(prompt_of, self._inputs.prompts))

    def _require_apart(
        self, dev: Sequence[BenchPrompt], test: Sequence[BenchPrompt], path: Path
    ) -> None:
        reported = {self._tokens(one) for one in test}
        shared = sum(self._tokens(one) in reported for one in dev)
        if shared:
            raise ConfigError(
                f"{path} shares prompts with those that results are reported on",
                expected="dev prompts that are no test prompts",
                got=f"{shared} of {len(dev)} in both",
                remedy="take them out of one of the two files",
            )

    def _tokens(self, prompt: BenchPrompt) -> tuple[int, ...]:
        """Return the first turn as the target reads it, however it was written."""
        vocab_size = self._inputs.target.spec.vocab_size
        return tuple(encode_prompt(prompt.first, self._inputs.tokenizer, vocab_size))
