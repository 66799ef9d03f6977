"""What is studied, and how it is measured."""

from pathlib import Path

from pydantic import Field, PositiveInt, model_validator

from inference.comparison.document import Temperatures
from jakiro.settings import Settings
from training.ablation.runs import Launcher

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
