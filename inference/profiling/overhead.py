"""What a round of decoding spends outside the forwards of target and drafter."""

import time
from statistics import median
from typing import NamedTuple

from inference.benchmark.stats import Figure, median_interval
from inference.benchmark.timing import note, now
from inference.profiling.forwards import Stopwatch, watched
from inference.profiling.subject import Subject
from inference.protocol import Drafter

GOAL = 0.10
PARTS = ("draft", "verify", "commit")


class Spent(NamedTuple):
    """Seconds per round of one run, the prompt and the first round left out."""

    total: float
    parts: dict[str, float]  # as the run itself counts them
    forwards: dict[str, float]

    @property
    def overhead(self) -> float:
        """Share of a round outside the forwards."""
        return 1 - sum(self.forwards.values()) / self.total


def measure_overhead(subject: Subject) -> dict[str, Figure]:
    """Return the share of a drafting round outside the forwards of target and drafter."""
    drafter = subject.trained()
    kinds: dict[str, tuple[Drafter | None, float]] = {
        "greedy": (drafter, 0.0),
        "sampled": (drafter, 1.0),
        "plain": (None, 0.0),
    }
    spent: dict[str, list[Spent]] = {kind: [] for kind in kinds}
    for place, prompt in enumerate([subject.prompts[0], *subject.prompts]):
        for kind, (used, temperature) in kinds.items():
            one = _spend(subject, used, prompt, temperature)
            if place > 0:  # the first prompt warms up
                spent[kind].append(one)
    shares = {kind: median_interval([one.overhead for one in spent[kind]]) for kind in kinds}
    for kind, share in shares.items():
        note(f"own overhead, {kind}: {share.value:.3f} [{share.low:.3f}, {share.high:.3f}]")
    details = {
        kind: {"share": shares[kind]._asdict(), "milliseconds": _milliseconds(spent[kind])}
        for kind in kinds
    }
    return {"own_overhead_share": Figure(shares["greedy"], GOAL, details)}


def _spend(
    subject: Subject, drafter: Drafter | None, prompt: list[int], temperature: float
) -> Spent:
    run = subject.start(drafter, [prompt], subject.effort.new_tokens, temperature)
    steps = iter(run)
    next(steps)  # reads the prompt
    next(steps)  # the drafter reads it, too
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
        "round": 1e3 * median(one.total for one in several),
        "parts": _medians([one.parts for one in several]),
        "forwards": _medians([one.forwards for one in several]),
    }


def _medians(several: list[dict[str, float]]) -> dict[str, float]:
    return {name: 1e3 * median(one[name] for one in several) for name in several[0]}
