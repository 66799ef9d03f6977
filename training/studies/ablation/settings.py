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
        max_steps: largest number of optimizer steps of a run, which replaces a number of epochs;
            None for the number in the settings.
        cell: name of the measurement and of the folder of its results inside `out`; None to write
            results into `out` itself.
        prompts: prompt file of `jakiro bench`; None for the beginnings of validation documents.
        trees: draft trees of all arms, written as the options of a drafter in `jakiro bench`.
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
