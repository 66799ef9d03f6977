"""Ways to continue prompts: what they have in common, and ours with or without a drafter."""

import time
from typing import Any, NamedTuple, Protocol, runtime_checkable

from inference.benchmark.samples import Arrival, Continuation, Decoded
from inference.decoder import SpeculativeDecoder
from inference.drafters.combined.drafter import CombinedDrafter
from inference.drafters.repeating import RepeatingDrafter
from inference.drafters.small_lm import SmallLMDrafter
from inference.drafters.trained.drafter import TrainedDrafter
from inference.engine.loop import DecodeRun
from inference.trees.shape import TreeShape


class SamplingOptions(NamedTuple):
    """How tokens are chosen, and how many."""

    temperature: float
    max_new_tokens: int
    top_p: float | None = None
    top_k: int | None = None

    @property
    def limits(self) -> dict[str, Any]:
        """What shapes the law of drawn tokens beside the temperature, as far as it is given."""
        given = {"top_p": self.top_p, "top_k": self.top_k} if self.temperature else {}
        return {name: value for name, value in given.items() if value is not None}


@runtime_checkable
class Method(Protocol):
    """One way to continue prompts."""

    name: str  # unique
    family: str  # methods of one family are one method at several settings: the best one counts
    kind: str
    note: str

    def decode(self, prompts: list[list[int]], sampling: SamplingOptions, seed: int) -> Decoded:
        """Continue prompts together."""
        ...

    def reset(self) -> None:
        """Forget what was learnt from earlier prompts."""
        ...

    def tree(self, temperature: float) -> TreeShape | None:
        """Return the shape of the draft trees, if it is fixed."""
        ...

    @property
    def parameters(self) -> int | None:
        """Number of the drafter's parameters."""
        ...


class OwnDecoding:
    """Our decode loop.

    Args:
        name: of the method.
        kind: `plain`, `drafter`, `aded`, `lookup` or `lm`.
        decoder: with or without a drafter.
        note: what a reader should know.
    """

    def __init__(self, name: str, kind: str, decoder: SpeculativeDecoder, note: str = "") -> None:
        self.name = self.family = name
        self.kind = kind
        self.decoder = decoder
        self.note = note

    def decode(self, prompts: list[list[int]], sampling: SamplingOptions, seed: int) -> Decoded:
        """Continue prompts together."""
        started = time.perf_counter()
        run = self.start(prompts, sampling, seed)
        arrivals: list[list[Arrival]] = [[] for _ in prompts]
        for steps in run:
            seconds = time.perf_counter() - started
            for one in steps:
                arrivals[one.index].append(Arrival(seconds, len(one.token_ids)))
        continuations = [
            Continuation(one.new_token_ids, when, one.stats)
            for one, when in zip(run.sequences, arrivals, strict=True)
        ]
        return Decoded(continuations, run.seconds)

    def start(self, prompts: list[list[int]], sampling: SamplingOptions, seed: int) -> DecodeRun:
        """Return a run that has yet to begin."""
        return self.decoder.start(
            prompts,
            temperature=sampling.temperature,
            seed=seed,
            max_new_tokens=sampling.max_new_tokens,
            **sampling.limits,
        )

    def reset(self) -> None:
        """Forget what was learnt from earlier prompts."""
        self.decoder.reset()

    def tree(self, temperature: float) -> TreeShape | None:
        """Return the shape of the draft trees, if it is fixed."""
        plan = self.decoder.plan
        if plan is None:
            return None
        return plan.sampling if temperature else plan.greedy

    @property
    def parameters(self) -> int | None:
        """Number of the drafter's parameters."""
        drafter = self.decoder.drafter
        if isinstance(drafter, RepeatingDrafter):
            drafter = drafter.drafter
        if isinstance(drafter, CombinedDrafter):
            drafter = drafter.first
        if isinstance(drafter, SmallLMDrafter):
            return drafter.model.model.num_parameters()
        return drafter.model.num_parameters() if isinstance(drafter, TrainedDrafter) else None
