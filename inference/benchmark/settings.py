"""Settings of a comparison, which are read and checked without torch."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from jakiro.utils.settings import Settings


def _different(temperatures: tuple[float, ...]) -> tuple[float, ...]:
    if len(set(temperatures)) < len(temperatures):
        raise ValueError("a temperature is given twice")
    return temperatures


Temperatures = Annotated[
    tuple[NonNegativeFloat, ...], Field(min_length=1), AfterValidator(_different)
]


class ComparisonSettings(Settings):
    """What is compared."""

    methods: tuple[str, ...] = Field(min_length=1)
    """A decoding method, such as transformers, autoregressive, lookup or drafter=PATH.
    --list-methods shows all methods and their options."""
    prompts: str
    """JSONL file with one of the keys prompt, turns and messages on each line, and optionally
    category; or a text file with one prompt per line."""
    num_prompts: PositiveInt | None = None
    """Largest number of prompts; by default all prompts in the file."""
    max_new_tokens: PositiveInt = 128
    """Largest number of new tokens in each chat turn."""
    temperatures: Temperatures = (0.0,)
    """Temperature, 0 for greedy decoding."""
    top_p: float | None = Field(None, gt=0, le=1)
    """As in generate(); by default the value of the target's generation config."""
    top_k: NonNegativeInt | None = None
    """As in generate(); by default the value of the target's generation config."""
    batch_size: PositiveInt = 1
    """Number of prompts to decode together."""
    repeats: PositiveInt = 1
    """Number of times to decode every prompt."""
    seed: NonNegativeInt = 0
    """Seed for the order of prompts and methods, and for sampling."""
    keep_state: bool = False
    """Let adaptive drafters keep what they learn from one prompt for the next ones."""
    threads: PositiveInt | Literal["auto"] | None = None
    """Number of threads to compute with on a CPU; "auto" for the fastest number for each method;
    None for torch's current number."""
    other_weights: bool = False
    """Use trained drafters even if they were trained for other weights of the target."""
    baseline: str | None = None
    """Name of the method that speed-ups are relative to; by default transformers,
    else autoregressive, else the first method."""
