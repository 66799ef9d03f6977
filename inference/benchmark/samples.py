"""Samples of a measurement: tokens, delivery times, and the time spent on decoding."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from inference.engine.stats import DecodeStats
from inference.generation.prompt_file import BenchPrompt

PARTS = ("prefill", "draft", "verify", "commit")


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
    parts: Mapping[str, float]  # seconds of those phases in `PARTS` that the method reports


@dataclass(frozen=True)
class Sample:
    """One decoding of a prompt with all its chat turns."""

    prompt: BenchPrompt
    repeat: int
    group: int
    turns: Sequence[Continuation]
    seconds: float  # the prompt's share of its group's seconds

    @property
    def stats(self) -> DecodeStats:
        """The pooled statistics of all chat turns."""
        return DecodeStats.pooled(turn.stats for turn in self.turns)

    @property
    def token_ids(self) -> list[list[int]]:
        """The new tokens of every chat turn."""
        return [turn.token_ids for turn in self.turns]

    @property
    def seconds_to_first_token(self) -> float:
        """The mean over chat turns of the seconds to the first token."""
        return sum(turn.arrivals[0].seconds for turn in self.turns) / len(self.turns)


class Take(NamedTuple):
    """One decoding of a group of prompts by a method."""

    samples: Sequence[Sample]
    parts: Mapping[str, float]  # seconds of those phases in `PARTS` that the method reports
    peak_memory: int | None

    @property
    def key(self) -> tuple[int, int]:
        """The numbers of the repeat and the group."""
        return self.samples[0].repeat, self.samples[0].group


@dataclass(frozen=True)
class Measured:
    """All measurements of a method at a temperature."""

    method: str
    temperature: float
    takes: list[Take] = field(default_factory=list)

    @property
    def samples(self) -> list[Sample]:
        """The samples of all groups."""
        return [sample for take in self.takes for sample in take.samples]

    @property
    def seconds(self) -> float:
        """The total seconds of all groups."""
        return sum(sample.seconds for sample in self.samples)

    @property
    def parts(self) -> dict[str, float]:
        """The total seconds of each phase."""
        return {part: sum(take.parts.get(part, 0.0) for take in self.takes) for part in PARTS}

    @property
    def peak_memory(self) -> int | None:
        """The peak memory over all groups, in bytes; None if it cannot be measured."""
        return max((take.peak_memory for take in self.takes if take.peak_memory), default=None)

    @property
    def tokens_per_second(self) -> float:
        """The number of new tokens divided by all seconds."""
        tokens = sum(sample.stats.emitted for sample in self.samples)
        return tokens / self.seconds if self.seconds else 0.0

    def only(self, keys: Collection[tuple[int, int]]) -> "Measured":
        """Return the measurements of the groups and repeats in `keys`."""
        takes = [take for take in self.takes if take.key in keys]
        return Measured(self.method, self.temperature, takes)
