"""Settings and results of a replay, as stored in JSON."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt

from inference.benchmark.document import Environment
from inference.benchmark.settings import Temperatures
from inference.benchmark.stats import Ratio
from jakiro.utils.settings import Settings

SCHEMA_VERSION: Literal[1] = 1


def _different(trees: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(trees)) < len(trees):
        raise ValueError("a size is given twice")
    return trees


class ReplaySettings(Settings):
    """Settings of a replay.

    Attributes:
        drafters: drafters, each as `NAME=PATH`. Several with the same name are trainings of the
            same drafter with different seeds, in the same order for all names. The first name is
            that of the baseline.
        trees: sizes of trees, each as `candidates=N` or `candidates=N,levels=M`. Without a number
            of levels, each drafter has those that it was trained for.
        prompts: path of the file with the prompts.
        num_prompts: largest number of prompts to use; None for all.
        max_new_tokens: largest number of new tokens in each chat turn.
        temperatures: sampling temperatures of the texts; 0 is greedy decoding.
        top_p: `top_p` of `generate()`; None for the target's default.
        top_k: `top_k` of `generate()`; None for the target's default.
        batch_size: number of prompts, or of chat turns, that are processed together.
        seed: seed of the texts and of the order of the prompts.
        other_weights: whether drafters may have been trained for other weights of the target.
    """

    drafters: tuple[str, ...] = Field(min_length=1)
    trees: Annotated[tuple[str, ...], Field(min_length=1), AfterValidator(_different)] = (
        "candidates=60",
    )
    prompts: str
    num_prompts: PositiveInt | None = None
    max_new_tokens: int = Field(128, ge=2)  # the first token needs no decoding step
    temperatures: Temperatures = (0.0,)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: NonNegativeInt | None = None
    batch_size: PositiveInt = 8
    seed: NonNegativeInt = 0
    other_weights: bool = False


class ReplayedPrompt(Settings):
    """Counts of a prompt, summed over its chat turns.

    Attributes:
        prompt: hash of the prompt's content.
        category: category of the prompt.
        decoded: number of tokens after the first one of each chat turn, which prefill delivers.
        steps: number of decoding steps in which the trained drafter would have produced them.
    """

    prompt: str
    category: str
    decoded: NonNegativeInt
    steps: NonNegativeInt


class ReplayedCategory(Settings):
    """Results of a drafter for the prompts of one category.

    Attributes:
        prompts: number of prompts, including those without tokens after the first one.
        tau: as in `ReplayRow`.
        ratio: as in `ReplayRow`.
    """

    prompts: int
    tau: Ratio
    ratio: Ratio


class ReplayRow(Settings):
    """Results of a drafter at a temperature with one size of trees.

    Attributes:
        drafter: name of the drafter.
        temperature: sampling temperature of the texts.
        trees: size of the trees.
        tau: tokens per decoding step, pooled over trainings and prompts, with the 95% interval over
            prompts and, if there are several, trainings; and tau of each training.
        ratio: tau divided by that of the baseline, with the same kind of interval. The trainings of
            both are paired by their order.
        conditional_acceptance_rate: for each depth, the share of the decoding steps with candidates
            to check at this depth that accepted one of them, pooled over trainings.
        counts: counts of each prompt, for each training.
        categories: results by category of prompts, if there are several; without categories in
            which fewer than five prompts have tokens after the first one.
    """

    drafter: str
    temperature: float
    trees: str
    tau: Ratio
    ratio: Ratio
    conditional_acceptance_rate: tuple[float, ...]
    counts: tuple[tuple[ReplayedPrompt, ...], ...]
    categories: dict[str, ReplayedCategory] = Field(default_factory=dict)


class ReplayDocument(Settings):
    """Results of a replay.

    Attributes:
        version: version of this schema.
        environment: machine, versions and target.
        settings: settings of the replay.
        is_complete: whether all texts were replayed; if not, the replay was interrupted, and only
            prompts that all drafters had replayed are included, and only temperatures with at least
            two such prompts that have tokens after the first one.
        prompts: number of prompts at the temperature with the most prompts.
        tokens: number of tokens of the included texts at each temperature.
        rows: results of each drafter, by temperature and size of trees.
    """

    version: Literal[1] = SCHEMA_VERSION
    environment: Environment
    settings: ReplaySettings
    is_complete: bool = True
    prompts: int
    tokens: dict[float, int]
    rows: tuple[ReplayRow, ...]
