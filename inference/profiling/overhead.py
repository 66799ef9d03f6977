"""Share of a decoding step that is spent outside the forward passes of target and drafter."""

import time
from statistics import median
from typing import NamedTuple

from inference.benchmark.stats import Figure, median_interval
from inference.benchmark.timing import note, now
from inference.profiling.forwards import Stopwatch, watched
from inference.profiling.subject import ProfilingSubject
from inference.protocol import Drafter

GOAL = 0.10  # largest acceptable share
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
    return {"own_overhead_share": Figure(shares["greedy"], GOAL, details)}


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
