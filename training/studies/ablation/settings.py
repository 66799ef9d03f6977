"""Settings of a study, which are read and checked without torch."""

from pathlib import Path

from pydantic import Field, PositiveInt

from inference.benchmark.settings import Temperatures
from jakiro.utils.settings import Settings
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
        cell: name of the measurement and of the folder of its results inside `out`; None to write
            results into `out` itself.
        launcher: "inline" to train in this process, "deepspeed" to train on all devices of this
            machine.
        prompts: prompt file of `jakiro bench`; None for the beginnings of validation documents.
        num_prompts: largest number of prompts.
        max_new_tokens: largest number of new tokens for each prompt.
        temperatures: sampling temperatures; 0 is greedy decoding.
        trees: draft trees of all arms, written as the options of a drafter in `jakiro bench`.
        repeats: number of times that each prompt is decoded.
    """

    base: Path
    config: tuple[Path, ...] = Field(min_length=1)
    out: Path
    overrides: tuple[str, ...] = ()
    seeds: PositiveInt = 3
    max_steps: PositiveInt | None = None
    any_size: bool = False
    cell: str | None = Field(None, pattern=r"^\w[\w.-]*$")
    launcher: Launcher = "inline"
    prompts: Path | None = None
    num_prompts: int = Field(40, ge=FEWEST_PROMPTS)
    max_new_tokens: PositiveInt = 64
    temperatures: Temperatures = (0.0, 1.0)
    trees: str = "candidates=8"
    repeats: PositiveInt = 1
