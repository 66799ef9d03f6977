"""Interface of decoding methods, and decoding by this package with or without a drafter."""

import time
from typing import Any, NamedTuple, Protocol

import torch

from inference.autotune.policy import AutoTree
from inference.benchmark.document import Continuation, Decoded
from inference.decoder import SpeculativeDecoder
from inference.engine.loop import DecodeRun


class SamplingOptions(NamedTuple):
    """Sampling options of a method, and the largest number of new tokens."""

    temperature: float
    max_new_tokens: int
    top_p: float | None = None
    top_k: int | None = None

    @property
    def limits(self) -> dict[str, Any]:
        """The values of `top_p` and `top_k` that are not None; empty for greedy decoding."""
        given = {"top_p": self.top_p, "top_k": self.top_k} if self.temperature else {}
        return {name: value for name, value in given.items() if value is not None}


class Method(Protocol):
    """A decoding method that can be measured."""

    name: str  # unique
    family: str  # name of the method of which this is one of several settings or trainings
    kind: str

    def decode(self, prompts: list[list[int]], sampling: SamplingOptions, seed: int) -> Decoded:
        """Continue prompts together."""
        ...

    def reset(self) -> None:
        """Discard what was learned from the texts of earlier prompts."""
        ...


class JakiroDecoding:
    """A method that decodes with this package."""

    def __init__(self, name: str, kind: str, decoder: SpeculativeDecoder) -> None:
        self.name = self.family = name
        self.kind = kind
        self.decoder = decoder

    def decode(self, prompts: list[list[int]], sampling: SamplingOptions, seed: int) -> Decoded:
        """Continue prompts together."""
        started = time.perf_counter()
        run = self.start(prompts, sampling, seed)
        first: dict[int, float] = {}
        for steps in run:
            seconds = time.perf_counter() - started
            for tokens in steps:
                first.setdefault(tokens.index, seconds)
        continuations = [
            Continuation(sequence.new_token_ids, first[index], sequence.stats)
            for index, sequence in enumerate(run.sequences)
        ]
        parts = {part: taken for part, taken in run.seconds.items() if part != "total"}
        return Decoded(continuations, parts)

    def start(self, prompts: list[list[int]], sampling: SamplingOptions, seed: int) -> DecodeRun:
        """Return a decoding run that has not started yet."""
        explicit: int | None = seed
        if isinstance(self.decoder.policy, AutoTree):
            # With an explicit seed, neither the trees nor the number of threads would change.
            torch.manual_seed(seed)
            explicit = None
        return self.decoder.start(
            prompts,
            temperature=sampling.temperature,
            seed=explicit,
            max_new_tokens=sampling.max_new_tokens,
            **sampling.limits,
        )

    def reset(self) -> None:
        """Discard what was learned from earlier texts; keep what was learned about tree sizes."""
        self.decoder.reset(trees=False)
