"""Settings of a study, which are read and checked without torch."""

from pathlib import Path

from pydantic import Field, PositiveInt, field_validator

from inference.benchmark.settings import DRAFTER, Temperatures, parse_methods
from jakiro.utils.settings import Settings

FEWEST_PROMPTS = 2  # smallest number for which there is an interval over prompts


class StudySettings(Settings):
    """Arms of a study, their training and their measurement."""

    base: Path
    """YAML file of the base, with the settings of a training run."""
    config: tuple[Path, ...] = Field(min_length=1)
    """YAML file with changes to the base. Each such file is an arm of the study, named after the
    file."""
    out: Path
    """Folder of runs and results."""
    overrides: tuple[str, ...] = ()
    """Replace a value of the base, KEY.PATH=VALUE."""
    seeds: PositiveInt = 3
    """Number of seeds with which every arm is trained."""
    max_steps: PositiveInt | None = None
    """Largest number of steps of a training run; it also replaces a number of epochs."""
    any_size: bool = False
    """Also compare arms that no expert width makes as large as the base; they keep their
    width."""
    cell: str | None = Field(None, pattern=r"^\w[\w.-]*$")
    """Name of this measurement, such as the kind of its prompts. Its results are written into a
    folder of this name inside --out, and measurements with different names share the trainings."""
    prompts: Path | None = None
    """Prompt file, as for `jakiro bench`; by default, the prompts are the beginnings of validation
    documents."""
    num_prompts: int = Field(32, ge=FEWEST_PROMPTS)
    """Largest number of prompts."""
    max_new_tokens: PositiveInt = 64
    """Largest number of new tokens for each prompt."""
    temperatures: Temperatures = (0.0, 1.0)
    """Temperature, 0 for greedy decoding."""
    trees: str = "candidates=8"
    """Draft trees of all arms, written as the options of a drafter in `jakiro bench`,
    such as tree=deterministic,candidates=60,levels=8."""
    repeats: PositiveInt = 1
    """Number of times that each prompt is decoded."""

    @field_validator("trees")
    @classmethod
    def _check_trees(cls, trees: str) -> str:
        parse_methods([f"{DRAFTER}=PATH,{trees}"])  # before hours of training
        return trees
