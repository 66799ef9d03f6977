"""Time of whole runs: batches of prompts, autoregressive decoding, and parts of decoding steps."""

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from inference.benchmark.stats import Figure, median_interval
from inference.benchmark.timing import note, now, seconds_of
from inference.decoder import SpeculativeDecoder
from inference.engine.loop import DecodeRun
from inference.profiling.forwards import Stopwatch, watched
from inference.profiling.subject import ProfilingSubject
from inference.protocol import Drafter

BATCH = 8  # number of prompts in a batch


def measure_batches(subject: ProfilingSubject) -> dict[str, Figure]:
    """Return the tokens per second of a batch of 8 prompts, relative to a single prompt."""
    drafter = subject.trained()
    speeds: dict[str, list[tuple[float, float]]] = {"autoregressive": [], "drafted": []}
    for repeat in range(subject.effort.repeats // 3 + 1):
        for kind, used in (("autoregressive", None), ("drafted", drafter)):
            pair = _speeds(subject, used, repeat)
            if repeat > 0:  # the first repeat is a warm-up
                speeds[kind].append(pair)
    scaling = {
        kind: median_interval([batch / single for single, batch in pairs])
        for kind, pairs in speeds.items()
    }
    details = {
        kind: {
            "scaling": scaling[kind]._asdict(),
            "tokens_per_second": {
                "1": median(single for single, _ in pairs),
                str(BATCH): median(batch for _, batch in pairs),
            },
        }
        for kind, pairs in speeds.items()
    }
    for kind, ratio in scaling.items():
        note(f"batch of {BATCH}, {kind}: {ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]")
    return {"batch8_scaling": Figure(scaling["autoregressive"], None, details)}


def _speeds(subject: ProfilingSubject, drafter: Drafter | None, repeat: int) -> tuple[float, float]:
    """Return the tokens per second of one prompt, and of a batch that begins with this prompt."""
    count = subject.effort.new_tokens
    prompts = [subject.prompts[(repeat + n) % len(subject.prompts)] for n in range(BATCH)]
    runs = [subject.start(drafter, several, count) for several in (prompts[:1], prompts)]
    first, second = (_speed(run) for run in (runs if repeat % 2 else runs[::-1]))
    return (first, second) if repeat % 2 else (second, first)


def _speed(run: DecodeRun) -> float:
    return run.finish().stats.tokens_per_second


# smallest acceptable ratios of the seconds of `generate()` to ours, without and with compilation
GOAL, COMPILED_GOAL = 1.05, 1.3
WARM_UPS = 2  # number of full generations before timing; the first one compiles

Method = Callable[[list[int]], object]


def measure_autoregressive(subject: ProfilingSubject) -> dict[str, Figure]:
    """Return how many times as long `generate()` takes as our decoder without drafts."""
    methods = _methods(subject)
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for method in methods.values():
        for _ in range(WARM_UPS):
            method(subject.prompts[0])
    names = list(methods)
    for number, prompt in enumerate(subject.prompts):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            seconds[name].append(seconds_of(partial(methods[name], prompt)))
        last = ", ".join(f"{name} {taken[-1]:.2f} s" for name, taken in seconds.items())
        note(f"autoregressive decoding, prompt {number + 1}: {last}")
    return {
        "autoregressive_vs_transformers": _figure(seconds, "autoregressive", GOAL),
        "compiled_vs_transformers": _figure(seconds, "compiled", COMPILED_GOAL),
    }


def by_transformers(model: PreTrainedModel, prompt: list[int], new_tokens: int) -> list[int]:
    """Return the prompt and its greedy continuation by transformers' `generate()`.

    Args:
        model: the target.
        prompt: token ids of the prompt.
        new_tokens: number of new tokens.
    """
    ids = torch.tensor([prompt], device=model.device)
    generate: Any = model.generate
    tokens = generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return [int(token) for token in tokens[0]]


def _methods(subject: ProfilingSubject) -> dict[str, Method]:
    count = subject.effort.new_tokens
    methods: dict[str, Method] = {
        "transformers": lambda ids: by_transformers(subject.model, ids, count),
        "autoregressive": _by_decoder(SpeculativeDecoder(subject.model), count),
    }
    if not subject.is_quick:
        methods["compiled"] = _by_decoder(SpeculativeDecoder(subject.model, compiled=True), count)
    return methods


def _by_decoder(decoder: SpeculativeDecoder, new_tokens: int) -> Method:
    return lambda ids: decoder.generate(ids, temperature=0.0, max_new_tokens=new_tokens)


def _figure(seconds: dict[str, list[float]], name: str, goal: float) -> Figure:
    if name not in seconds:
        return Figure(None, goal, {"note": "not measured in a quick run"})
    pairs = zip(seconds["transformers"], seconds[name], strict=True)
    return Figure(median_interval([theirs / ours for theirs, ours in pairs]), goal)


# largest acceptable share of a decoding step that is spent outside the forward passes
OVERHEAD_GOAL = 0.10
PARTS = ("draft", "verify", "commit")


class Spent(NamedTuple):
    """Seconds per decoding step of a run, excluding the prefill and the first step."""

    total: float
    parts: dict[str, float]  # seconds by part of the step, as measured by the run
    forwards: dict[str, float]  # seconds by kind of forward pass, such as `logits`

    @property
    def overhead(self) -> float:
        """The share of a decoding step that is spent outside the forward passes."""
        return 1 - sum(self.forwards.values()) / self.total


def measure_overhead(subject: ProfilingSubject) -> dict[str, Figure]:
    """Return the share of a decoding step that is spent outside the forward passes."""
    drafter = subject.trained()
    kinds: dict[str, tuple[Drafter | None, float]] = {
        "greedy": (drafter, 0.0),
        "sampled": (drafter, 1.0),
        "autoregressive": (None, 0.0),
    }
    spent: dict[str, list[Spent]] = {kind: [] for kind in kinds}
    for number, prompt in enumerate([subject.prompts[0], *subject.prompts]):
        for kind, (used, temperature) in kinds.items():
            taken = _spend(subject, used, prompt, temperature)
            if number > 0:  # the first decoding is a warm-up
                spent[kind].append(taken)
    shares = {kind: median_interval([run.overhead for run in spent[kind]]) for kind in kinds}
    for kind, share in shares.items():
        note(f"overhead, {kind}: {share.value:.3f} [{share.low:.3f}, {share.high:.3f}]")
    details = {
        kind: {"share": shares[kind]._asdict(), "milliseconds": _milliseconds(spent[kind])}
        for kind in kinds
    }
    return {"own_overhead_share": Figure(shares["greedy"], OVERHEAD_GOAL, details)}


def _spend(
    subject: ProfilingSubject, drafter: Drafter | None, prompt: list[int], temperature: float
) -> Spent:
    run = subject.start(drafter, [prompt], subject.effort.new_tokens, temperature)
    steps = iter(run)
    next(steps)  # prefill
    next(steps)  # in this step, the drafter encodes the prompt
    before, count = dict(run.seconds), run.num_steps
    watch = Stopwatch()
    with watched(subject.target, subject.drafter, watch):
        started = now()
        for _ in steps:
            pass
        total = time.perf_counter() - started
    count = run.num_steps - count
    parts = {part: run.seconds[part] - before.get(part, 0.0) for part in PARTS}
    return Spent(
        total / count,
        {part: seconds / count for part, seconds in parts.items()},
        {name: seconds / count for name, seconds in watch.seconds.items()},
    )


def _milliseconds(several: list[Spent]) -> dict[str, dict[str, float] | float]:
    return {
        "step": 1e3 * median(run.total for run in several),
        "parts": _medians([run.parts for run in several]),
        "forwards": _medians([run.forwards for run in several]),
    }


def _medians(several: list[dict[str, float]]) -> dict[str, float]:
    return {name: 1e3 * median(seconds[name] for seconds in several) for name in several[0]}
