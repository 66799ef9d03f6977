"""Interface of decoding methods, and decoding by this package with or without a drafter."""

import time
from typing import Any, NamedTuple, Protocol

import torch

from inference.autotune.policy import AutoTree
from inference.benchmark.document import Arrival, Continuation, Decoded
from inference.decoder import SpeculativeDecoder
from inference.drafters.combined.drafter import CombinedDrafter
from inference.drafters.repeating import RepeatingDrafter
from inference.drafters.small_lm import SmallLMDrafter
from inference.drafters.trained.drafter import TrainedDrafter
from inference.engine.loop import DecodeRun
from inference.trees.shape import TreeShape


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
    family: str  # name under which the fastest of several settings is reported
    kind: str
    note: str  # remark for readers of the report
    threads: int | None  # number of threads of decoding steps; None for torch's current number

    def decode(self, prompts: list[list[int]], sampling: SamplingOptions, seed: int) -> Decoded:
        """Continue prompts together."""
        ...

    def reset(self) -> None:
        """Discard what was learned from the texts of earlier prompts."""
        ...

    def tree(self, temperature: float) -> TreeShape | None:
        """Return the shape of the draft trees; None if there are no trees of a fixed shape."""
        ...

    @property
    def parameters(self) -> int | None:
        """The number of the drafter's parameters; None if no model drafts."""
        ...


def setting(method: Method) -> str:
    """Return in words what distinguishes a method from others of its family."""
    count = method.threads
    threads = "" if count is None else f"{count} thread{'s' if count > 1 else ''}"
    return ", ".join(part for part in (method.note, threads) if part)


class JakiroDecoding:
    """A method that decodes with this package."""

    def __init__(self, name: str, kind: str, decoder: SpeculativeDecoder, note: str = "") -> None:
        self.name = self.family = name
        self.kind = kind
        self.decoder = decoder
        self.note = note
        self.threads = decoder.threads

    def decode(self, prompts: list[list[int]], sampling: SamplingOptions, seed: int) -> Decoded:
        """Continue prompts together."""
        started = time.perf_counter()
        run = self.start(prompts, sampling, seed)
        arrivals: list[list[Arrival]] = [[] for _ in prompts]
        for steps in run:
            seconds = time.perf_counter() - started
            for tokens in steps:
                arrivals[tokens.index].append(Arrival(seconds, len(tokens.token_ids)))
        continuations = [
            Continuation(sequence.new_token_ids, when, sequence.stats)
            for sequence, when in zip(run.sequences, arrivals, strict=True)
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

    def tree(self, temperature: float) -> TreeShape | None:
        """Return the shape of the draft trees; None if there are no trees of a fixed shape."""
        plan = self.decoder.plan
        if plan is None:
            return None
        return plan.sampling if temperature else plan.greedy

    @property
    def parameters(self) -> int | None:
        """The number of the drafter's parameters; None if no model drafts."""
        drafter = self.decoder.drafter
        if isinstance(drafter, RepeatingDrafter):
            drafter = drafter.drafter
        if isinstance(drafter, CombinedDrafter):
            drafter = drafter.first
        if isinstance(drafter, SmallLMDrafter):
            return drafter.model.model.num_parameters()
        return drafter.model.num_parameters() if isinstance(drafter, TrainedDrafter) else None
