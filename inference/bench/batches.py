"""Tokens per second of several prompts decoded together against one alone."""

from statistics import median

from inference.bench.intervals import Figure, median_interval
from inference.bench.subject import Subject
from inference.bench.timing import note
from inference.engine import DecodeRun
from inference.protocol import Drafter

BATCH = 8


def measure_batches(subject: Subject) -> dict[str, Figure]:
    """Return how many times as many tokens per second 8 prompts have together, plain or drafted."""
    drafter = subject.trained()
    speeds: dict[str, list[tuple[float, float]]] = {"plain": [], "drafted": []}
    for turn in range(subject.effort.repeats // 3 + 1):
        for kind, used in (("plain", None), ("drafted", drafter)):
            pair = _speeds(subject, used, turn)
            if turn > 0:  # the first one warms up
                speeds[kind].append(pair)
    scaling = {
        kind: median_interval([many / one for one, many in pairs]) for kind, pairs in speeds.items()
    }
    details = {
        kind: {
            "scaling": scaling[kind]._asdict(),
            "tokens_per_second": {
                "1": median(one for one, _ in pairs),
                str(BATCH): median(many for _, many in pairs),
            },
        }
        for kind, pairs in speeds.items()
    }
    for kind, one in scaling.items():
        note(f"batch of {BATCH}, {kind}: {one.value:.2f} [{one.low:.2f}, {one.high:.2f}]")
    return {"batch8_scaling": Figure(scaling["plain"], None, details)}


def _speeds(subject: Subject, drafter: Drafter | None, turn: int) -> tuple[float, float]:
    """Return tokens per second of one prompt, and of a batch that begins with it."""
    count = subject.effort.new_tokens
    prompts = [subject.prompts[(turn + n) % len(subject.prompts)] for n in range(BATCH)]
    runs = [subject.start(drafter, several, count) for several in (prompts[:1], prompts)]
    one, many = (_speed(run) for run in (runs if turn % 2 else runs[::-1]))
    return (one, many) if turn % 2 else (many, one)


def _speed(run: DecodeRun) -> float:
    return run.finish().stats.tokens_per_second
