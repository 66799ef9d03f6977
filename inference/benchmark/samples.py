"""What a method made of prompts: tokens, when they came, and what they cost."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from inference.engine.stats import DecodeStats
from inference.generation.prompt_file import BenchPrompt

PARTS = ("prefill", "draft", "verify", "commit")


class Arrival(NamedTuple):
    """Tokens that were delivered together."""

    seconds: float  # since the prompt was given
    num_tokens: int


@dataclass(frozen=True)
class Continuation:
    """The answer to one turn. Its statistics hold counts only: seconds are the group's."""

    token_ids: list[int]
    arrivals: list[Arrival]
    stats: DecodeStats

    @property
    def gaps(self) -> list[float]:
        """Seconds from each token to the next, for those delivered together spread evenly."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return [
            (after.seconds - before.seconds) / after.num_tokens
            for before, after in pairs
            for _ in range(after.num_tokens)
        ]


class Decoded(NamedTuple):
    """Prompts that were decoded together."""

    continuations: list[Continuation]
    parts: Mapping[str, float]  # seconds by `PARTS`, as far as the method tells


@dataclass(frozen=True)
class Sample:
    """One prompt of the file, all its turns, decoded once."""

    prompt: BenchPrompt
    repeat: int
    group: int
    turns: Sequence[Continuation]
    seconds: float  # its share of its group's

    @property
    def stats(self) -> DecodeStats:
        """Counts over all turns."""
        return DecodeStats.pooled(turn.stats for turn in self.turns)

    @property
    def token_ids(self) -> list[list[int]]:
        """New tokens of every turn."""
        return [turn.token_ids for turn in self.turns]

    @property
    def seconds_to_first_token(self) -> float:
        """Mean over turns."""
        return sum(turn.arrivals[0].seconds for turn in self.turns) / len(self.turns)


class Take(NamedTuple):
    """One group of prompts, decoded once by one method."""

    samples: Sequence[Sample]
    parts: Mapping[str, float]  # seconds by `PARTS`, as far as the method tells
    peak_memory: int | None

    @property
    def place(self) -> tuple[int, int]:
        """Which repeat of which group it is."""
        return self.samples[0].repeat, self.samples[0].group


@dataclass(frozen=True)
class Measured:
    """All that one method did at one temperature."""

    method: str
    temperature: float
    takes: list[Take] = field(default_factory=list)

    @property
    def samples(self) -> list[Sample]:
        """Of all groups."""
        return [sample for take in self.takes for sample in take.samples]

    @property
    def seconds(self) -> float:
        """Of all groups."""
        return sum(sample.seconds for sample in self.samples)

    @property
    def parts(self) -> dict[str, float]:
        """Where the seconds went."""
        return {part: sum(take.parts.get(part, 0.0) for take in self.takes) for part in PARTS}

    @property
    def peak_memory(self) -> int | None:
        """The highest of all groups, in bytes."""
        return max((take.peak_memory for take in self.takes if take.peak_memory), default=None)

    @property
    def tokens_per_second(self) -> float:
        """New tokens over all seconds."""
        tokens = sum(sample.stats.emitted for sample in self.samples)
        return tokens / self.seconds if self.seconds else 0.0

    def only(self, places: Collection[tuple[int, int]]) -> "Measured":
        """Return what was done of some groups."""
        takes = [take for take in self.takes if take.place in places]
        return Measured(self.method, self.temperature, takes)
