"""What a method made of prompts: tokens, when they came, and what they cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from inference.comparison.prompt_file import BenchPrompt
from inference.stats import DecodeStats

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


@dataclass
class Measured:
    """All samples of one method at one temperature."""

    method: str
    temperature: float
    samples: list[Sample] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    seconds: float = 0.0
    peak_memory: int | None = None

    def take(
        self, samples: Sequence[Sample], parts: Mapping[str, float], peak_memory: int | None
    ) -> None:
        """Add a group that was decoded together."""
        self.samples += samples
        if peak_memory is not None:
            self.peak_memory = max(self.peak_memory or 0, peak_memory)
        self.seconds += sum(sample.seconds for sample in samples)
        for part in PARTS:
            self.parts[part] += parts.get(part, 0.0)

    @property
    def tokens_per_second(self) -> float:
        """New tokens over all seconds."""
        tokens = sum(sample.stats.emitted for sample in self.samples)
        return tokens / self.seconds if self.seconds else 0.0
