"""Records of a comparison: delivered tokens, samples, and the JSON document with all figures.

Times are in wall-clock seconds.
"""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from pydantic import Field, NonNegativeInt, PositiveInt, SkipValidation

from inference.benchmark.settings import ComparisonSettings
from inference.engine.stats import DecodeStats
from inference.generation.prompt_file import BenchPrompt
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.devices import processor
from jakiro.utils.provenance import provenance
from jakiro.utils.settings import Settings
from jakiro.utils.wording import dtype_name


class TargetFacts(Settings):
    """Properties of the target."""

    name_or_path: str
    fingerprint: str
    parameters: int
    dtype: str
    # checksum of the GGUF file that the target was converted from; None if there is no such file
    gguf_sha256: str | None = None

    @property
    def weights(self) -> str:
        """The dtype of the weights, and whether they were dequantized."""
        origin = "" if self.gguf_sha256 is None else " (dequantized from a GGUF file)"
        return f"{self.dtype}{origin}"


class Environment(Settings):
    """Machine, versions and target of a measurement."""

    time: str  # UTC, ISO 8601
    argv: tuple[str, ...]
    commit: str | None
    is_dirty: bool | None  # whether the checkout had uncommitted changes
    versions: dict[str, str | None]
    platform: str
    processor: str
    num_cpus: int | None
    # over the minute before the measurement; other processes distort the timings
    load_average: float | None
    device: str
    threads: int
    target: TargetFacts


class Continuation(NamedTuple):
    """The answer to a chat turn; `stats` has no seconds, because whole groups are timed."""

    token_ids: list[int]
    seconds_to_first_token: float
    stats: DecodeStats


class Decoded(NamedTuple):
    """Results of prompts that were decoded together."""

    continuations: list[Continuation]
    parts: Mapping[str, float]  # seconds of those phases that the method reports


class Sample(Settings):
    """One decoding of a prompt; seconds are divided evenly among prompts decoded together.

    For methods of transformers, prefill lasts until the first delivery, and what follows is
    `verify` unless the method drafts. On an accelerator, seconds are measured on the host: work
    that the host queues is included in the phase in which the host waits for the result.
    """

    prompt: str  # hash of the prompt's content
    category: str
    repeat: int
    group: int  # number of the group of prompts decoded together; the same in every repeat
    tokens: int  # all new tokens
    decoded: NonNegativeInt  # tokens delivered after prefill
    target_forwards: int  # forward passes of the target after prefill
    turns: PositiveInt = 1  # number of chat turns, each of which is a request
    seconds: float
    prefill: float = 0.0  # part of the seconds, as the next three
    draft: float = 0.0
    verify: float = 0.0
    commit: float = 0.0
    seconds_to_first_token: float  # mean over chat turns
    # to every chat turn; not stored
    answers: SkipValidation[tuple[Continuation, ...]] = Field((), exclude=True, repr=False)

    @classmethod
    def of(
        cls,
        prompt: BenchPrompt,
        answers: Sequence[Continuation],
        seconds: Mapping[str, float],
        repeat: int,
        group: int,
    ) -> "Sample":
        """Return the sample of a prompt with its answers, its seconds and those of phases."""
        stats = DecodeStats.pooled(answer.stats for answer in answers)
        return cls(
            prompt=prompt.fingerprint,
            category=prompt.category,
            repeat=repeat,
            group=group,
            tokens=stats.emitted,
            decoded=stats.decoded,
            target_forwards=stats.target_forwards,
            turns=len(answers),
            **seconds,
            seconds_to_first_token=fmean(one.seconds_to_first_token for one in answers),
            answers=tuple(answers),
        )

    @property
    def token_ids(self) -> list[list[int]]:
        """The new tokens of every chat turn."""
        return [answer.token_ids for answer in self.answers]


class MethodFigures(Settings):
    """Figures of a method at a temperature.

    In a replay, `target_forwards` is the number of steps in which the drafter would have produced
    the text, and seconds and speeds say nothing.

    Attributes:
        family: name of the method of which this is one of several settings or trainings.
        tau: mean acceptance length, which is the number of tokens per forward pass of the target,
            pooled over all samples; it is 1 for autoregressive decoding. Prefill and the tokens
            that prefill delivers are not included. Prefill usually delivers one token, but several
            if it also verifies drafts, as in transformers' prompt lookup.
        speedup: tokens per second divided by those of the baseline at the same temperature. The
            ends of its 95% interval over prompts are `speedup_low` and `speedup_high`.
        drafting_share: share of the forward passes that verify drafts; None for methods without
            drafts and for those of transformers.
        identical_share: share of the answers whose tokens are all those of transformers'
            `generate()`; None if tokens are sampled.
        conditional_acceptance_rate: for each depth, the share of decoding steps that accepted a
            candidate at that depth, among those with candidates to check there.
        seconds_to_first_token: median over all samples.
    """

    name: str
    family: str | None = None
    kind: str
    temperature: float
    tau: float
    tokens_per_second: float
    speedup: float
    speedup_low: float
    speedup_high: float
    tokens: int
    target_forwards: int
    drafting_share: float | None = None
    identical_share: float | None
    conditional_acceptance_rate: tuple[float, ...] = ()
    seconds_to_first_token: float
    samples: tuple[Sample, ...]


class ComparisonDocument(Settings):
    """Everything that `jakiro bench` stores about a comparison.

    Attributes:
        is_complete: whether all prompts were decoded at all temperatures in all repeats; if not,
            the measurement was interrupted, and only prompts that all methods decoded are included.
        baseline: method that speed-ups are relative to. If it was measured with several settings,
            such as "transformers (1 thread)", each of them is one of the methods; the speed-up of
            the fastest one at each temperature is 1.
    """

    environment: Environment
    settings: ComparisonSettings
    prompts: int
    is_complete: bool = True
    baseline: str
    methods: tuple[MethodFigures, ...]

    def figures(self, name: str, temperature: float) -> MethodFigures:
        for method in self.methods:
            if (method.name, method.temperature) == (name, temperature):
                return method
        raise KeyError((name, temperature))


def read_document(path: Path) -> ComparisonDocument:
    """Return the document in a file that `jakiro bench --json` wrote, also an earlier version."""
    return ComparisonDocument.model_validate_json(path.read_bytes(), extra="ignore")


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def environment_of(target: TargetAdapter, name_or_path: str) -> Environment:
    """Return the machine, versions and target of a comparison."""
    origin = provenance()
    git = origin.pop("git") or {"sha": None, "is_dirty": None}
    return Environment(
        **origin,
        commit=git["sha"],
        is_dirty=git["is_dirty"],
        processor=processor(),
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        device=device_name(target.device),
        threads=torch.get_num_threads(),
        target=TargetFacts(
            name_or_path=name_or_path,
            fingerprint=target.spec.fingerprint,
            parameters=target.model.num_parameters(),
            dtype=dtype_name(target.dtype),
            gguf_sha256=target.spec.gguf_sha256,
        ),
    )


def now() -> float:
    """Return the seconds of a monotonic clock, after the accelerator has done all queued work."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()
