"""Records of a comparison: delivered tokens, samples, and the JSON document with all figures.

Times are in wall-clock seconds, and memory is in bytes.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt, SkipValidation

from inference.benchmark.machine import Environment
from inference.benchmark.settings import ComparisonSettings
from inference.engine.stats import DecodeStats
from inference.generation.prompt_file import BenchPrompt
from inference.trees.shape import TreeShape
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


class Seconds(Settings):
    """Seconds by phase, summed over all samples; `other` is the time outside reported phases.

    For methods of transformers, prefill lasts until the first delivery, and everything after it
    counts as `verify`, or as `other` if the method drafts.

    On an accelerator, the seconds are measured on the host. Work that the host queues is included
    in the phase in which the host waits for the result.
    """

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    commit: float = 0.0
    other: float


class Quantiles(Settings):
    """Median and 95th percentile, in seconds."""

    p50: float
    p95: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Quantiles":
        """Return the quantiles of values; zero if there are none."""
        middle, high = np.quantile(values or [0.0], (0.5, 0.95))
        return cls(p50=float(middle), p95=float(high))


class ExpertFigures(Settings):
    """Numbers of proposed and accepted candidates of an expert, or of another candidate source."""

    expert: int
    proposed: int  # candidates to which this expert gave the highest score of all experts
    accepted: int


class MainFigures(Settings):
    """The main figures of a method.

    Attributes:
        tau: mean acceptance length, which is the number of tokens per forward pass of the target,
            pooled over all samples; it is 1 for autoregressive decoding. Prefill and the tokens
            that prefill delivers are not included. Prefill usually delivers one token, but several
            if it also verifies drafts, as in transformers' assisted decoding.
        speedup: tokens per second divided by those of the baseline at the same temperature. The
            ends of its 95% interval over prompts are `speedup_low` and `speedup_high`.
    """

    model_config = ConfigDict(extra="ignore")  # older documents have more figures

    tau: float
    tokens_per_second: float
    speedup: float
    speedup_low: float
    speedup_high: float


class CategoryFigures(MainFigures):
    """The main figures of a method over the prompts of one category."""

    prompts: int


class MethodFigures(MainFigures):
    """Figures of a method at a temperature.

    Attributes:
        tau_low, tau_high: ends of the 95% interval of tau over prompts.
        drafting_share: share of the forward passes that verify drafts; None for methods without
            drafts and for those of transformers.
        decoding_tokens_per_second: tokens after the first delivery, divided by the seconds after
            the first delivery.
        identical_to_target: whether all tokens are those of transformers' `generate()`; None if
            tokens are sampled.
        conditional_acceptance_rate: for each depth, the share of decoding steps that accepted a
            candidate at that depth, among those with candidates to check there.
        acceptance_rate_per_position: for each depth, the share of all decoding steps that accepted
            a draft at that depth.
        inter_token: quantiles of the seconds between tokens; the seconds between two deliveries are
            divided evenly among tokens delivered together.
        peak_memory_bytes: peak memory of the process (on an accelerator, of the device) while this
            method ran, including all loaded models; None if it cannot be measured. On a CPU, this
            is an upper bound, because memory that other methods have freed may still be included.
    """

    name: str
    kind: str
    temperature: float
    tau_low: float
    tau_high: float
    tokens: int
    target_forwards: int
    drafting_share: float | None = None
    decoding_tokens_per_second: float
    identical_to_target: bool | None
    identical_share: float | None
    conditional_acceptance_rate: tuple[float, ...] = ()
    acceptance_rate_per_position: tuple[float, ...] = ()
    experts: tuple[ExpertFigures, ...] = ()
    seconds: Seconds
    time_to_first_token: Quantiles
    inter_token: Quantiles
    peak_memory_bytes: int | None
    tree: TreeShape | None = None
    parameters: int | None = None
    notes: tuple[str, ...] = ()
    categories: dict[str, CategoryFigures] = Field(default_factory=dict)
    samples: tuple[Sample, ...]


class ComparisonDocument(Settings):
    """Everything that `jakiro bench` stores about a comparison.

    Attributes:
        is_complete: whether all prompts were decoded at all temperatures in all repeats; if not,
            the measurement was interrupted, and only prompts that all methods decoded are included.
    """

    model_config = ConfigDict(extra="ignore")  # older documents also have texts and trees

    version: Literal[1] = 1
    environment: Environment
    settings: ComparisonSettings
    prompts: int
    is_complete: bool = True
    baseline: str
    methods: tuple[MethodFigures, ...]

    def figures(self, name: str, temperature: float) -> MethodFigures:
        """Return the figures of a method at a temperature."""
        for method in self.methods:
            if (method.name, method.temperature) == (name, temperature):
                return method
        raise KeyError((name, temperature))


def read_document(path: Path) -> ComparisonDocument:
    """Return the document in a file that `jakiro bench --json` wrote."""
    return ComparisonDocument.model_validate_json(path.read_bytes())
