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
    """Settings of a comparison: methods, prompts, and how often each prompt is decoded.

    Attributes:
        methods: method names as the caller gave them, such as `autoregressive` or
            `drafter=PATH,tree=auto`.
        prompts: path of the file with the prompts.
        num_prompts: largest number of prompts to use; None for all.
        max_new_tokens: largest number of new tokens in each chat turn.
        temperatures: sampling temperatures; 0 is greedy decoding.
        top_p: `top_p` of `generate()`; None for the target's default.
        top_k: `top_k` of `generate()`; None for the target's default.
        batch_size: number of prompts that are decoded together.
        repeats: number of times that every prompt is decoded, each time with different random
            numbers.
        seed: seed that determines the order of prompts and methods, and all other random choices.
        keep_state: whether adaptive methods keep what they have learned from earlier prompts; if
            not, they are reset before each group of prompts.
        threads: number of threads to compute with on a CPU; "auto" for the fastest number for each
            method; None for torch's current number.
        packed: whether this package reorders the target's weights for the CPU; "auto" for what is
            faster.
        other_weights: whether trained drafters may have been trained for other weights of the
            target.
        baseline: name of the method that speed-ups refer to; None for `transformers` if that
            method is compared, else for `autoregressive` if that method is compared, else for the
            first method.
    """

    methods: tuple[str, ...] = Field(min_length=1)
    prompts: str
    num_prompts: PositiveInt | None = None
    max_new_tokens: PositiveInt = 128
    temperatures: Temperatures = (0.0,)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: NonNegativeInt | None = None
    batch_size: PositiveInt = 1
    repeats: PositiveInt = 1
    seed: NonNegativeInt = 0
    keep_state: bool = False
    threads: PositiveInt | Literal["auto"] | None = None
    packed: bool | Literal["auto"] = False
    other_weights: bool = False
    baseline: str | None = None
