"""Samples of a measurement: tokens, delivery times, and the time spent on decoding."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt, SkipValidation

from inference.benchmark.stats import Floats, Rate
from inference.engine.stats import DecodeStats
from inference.generation.prompt_file import BenchPrompt
from jakiro.errors import DataError
from jakiro.utils.settings import Settings


class Arrival(NamedTuple):
    """Tokens that were delivered together."""

    seconds: float  # since the start of decoding
    num_tokens: int


@dataclass(frozen=True)
class Continuation:
    """The answer to a chat turn; `stats` has no seconds, because whole groups are timed."""

    token_ids: list[int]
    arrivals: list[Arrival]
    stats: DecodeStats

    @property
    def gaps(self) -> list[float]:
        """The seconds before each token after the first delivery.

        The seconds between two deliveries are divided evenly among the tokens of the later one.
        """
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return [
            (after.seconds - before.seconds) / after.num_tokens
            for before, after in pairs
            for _ in range(after.num_tokens)
        ]


class Decoded(NamedTuple):
    """Results of prompts that were decoded together."""

    continuations: list[Continuation]
    parts: Mapping[str, float]  # seconds of those phases that the method reports


class Sample(Settings):
    """One decoding of a prompt; seconds are divided evenly among prompts decoded together."""

    model_config = ConfigDict(extra="ignore")  # older documents also have texts

    prompt: str  # hash of the prompt's content
    category: str
    repeat: int
    group: int  # number of the group of prompts decoded together; the same in every repeat
    tokens: int  # all new tokens
    decoded: NonNegativeInt  # tokens delivered after prefill
    target_forwards: int  # forward passes of the target after prefill
    turns: PositiveInt = 1  # number of chat turns, each of which is a request
    seconds: float
    seconds_to_first_token: float  # mean over chat turns
    # to every chat turn; not stored
    answers: SkipValidation[tuple[Continuation, ...]] = Field((), exclude=True, repr=False)

    @classmethod
    def of(
        cls, prompt: BenchPrompt, answers: Sequence[Continuation], seconds: float, place: "Place"
    ) -> "Sample":
        """Return the sample of a prompt with its answers."""
        stats = DecodeStats.pooled(answer.stats for answer in answers)
        return cls(
            prompt=prompt.fingerprint,
            category=prompt.category,
            repeat=place.repeat,
            group=place.group,
            tokens=stats.emitted,
            decoded=stats.decoded,
            target_forwards=stats.target_forwards,
            turns=len(answers),
            seconds=seconds,
            seconds_to_first_token=sum(answer.arrivals[0].seconds for answer in answers)
            / len(answers),
            answers=tuple(answers),
        )

    @property
    def token_ids(self) -> list[list[int]]:
        """The new tokens of every chat turn."""
        return [answer.token_ids for answer in self.answers]


class Place(NamedTuple):
    """The numbers of a repeat, and of a group of prompts."""

    repeat: int = 0
    group: int = 0


@dataclass
class Measured:
    """All measurements of a method at a temperature."""

    samples: list[Sample] = field(default_factory=list)
    parts: Counter[str] = field(default_factory=Counter)  # seconds of each phase
    peak_memory: int | None = None  # over all groups, in bytes; None if it cannot be measured

    @property
    def seconds(self) -> float:
        """The total seconds of all groups."""
        return sum(sample.seconds for sample in self.samples)

    @property
    def tokens_per_second(self) -> float:
        """The number of new tokens divided by all seconds."""
        tokens = sum(sample.tokens for sample in self.samples)
        return tokens / self.seconds if self.seconds else 0.0

    def add(self, other: "Measured") -> None:
        """Add the measurements of another group."""
        self.samples += other.samples
        self.parts.update(other.parts)
        if other.peak_memory is not None:
            self.peak_memory = max(self.peak_memory or 0, other.peak_memory)


TAU = ("decoded", "target_forwards")  # tokens per forward pass of the target, both after prefill
SPEED = ("tokens", "seconds")


def rate_of(
    trainings: Sequence[Sequence[Sample]],
    fields: tuple[str, str],
    units: Sequence[Hashable],
    unit: str = "prompt",
) -> Rate:
    """Return the rate of two fields of samples, summed over the samples of each unit.

    Args:
        trainings: samples of each training of a method.
        units: names of all prompts or groups, in the same order for rates that are compared.
        unit: field of a sample with the name of its unit.

    Raises:
        DataError: the samples of a training are not those of all units.
    """
    index_of = {name: index for index, name in enumerate(units)}
    sums: dict[str, Floats] = {name: np.zeros((len(trainings), len(units))) for name in fields}
    for number, samples in enumerate(trainings):
        if {getattr(sample, unit) for sample in samples} != index_of.keys():
            raise DataError(
                "methods or seeds were measured on different prompts, and cannot be compared "
                "prompt by prompt; measure again, with the same prompt file and number of prompts"
            )
        for sample in samples:
            for name, values in sums.items():
                values[number, index_of[getattr(sample, unit)]] += getattr(sample, name)
    return Rate(*sums.values())
