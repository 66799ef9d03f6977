"""Seconds of the parts of a decoding step; the host waits for the device after each part."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import inference.engine.batch as decoding
from inference.benchmark.timing import Work, seconds_of
from inference.engine.loop import DecodeRun
from inference.profiling.forwards import Stopwatch

PARTS = ("draft", "verify", "accept", "commit")


def milliseconds_of_parts(run: DecodeRun, work: Work, num_steps: int) -> dict[str, float]:
    """Return the milliseconds per decoding step of each part; `host` is all other time.

    The parts are drafting (with the encoding of memory), the target's forward pass with its
    logits, acceptance (with the copy of its result to the host), and the update of the caches. As
    the host waits for the device after each part, their sum exceeds the time of an ordinary step.

    Args:
        run: run that has read its prompts.
        work: function that performs decoding steps of the run.
        num_steps: number of these steps.
    """
    watch = Stopwatch()
    with _watched(run, watch):
        total = seconds_of(work)
    parts = {name: 1e3 * watch.seconds[name] / num_steps for name in PARTS}
    return {**parts, "host": 1e3 * total / num_steps - sum(parts.values())}


@contextmanager
def _watched(run: DecodeRun, watch: Stopwatch) -> Iterator[None]:
    """Route the parts of decoding steps through a stopwatch."""
    seams: list[tuple[str, Any, str]] = [
        ("draft", run.context, "propose"),
        ("verify", run.target, "forward"),
        ("verify", run.target, "logits"),
        ("accept", decoding, "accept_trees"),
        ("commit", run.context, "commit"),
    ]
    originals = [getattr(owner, name) for _, owner, name in seams]
    depth = 0

    def timed(part: str, call: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        if depth:  # drafting computes logits by the target's head
            return call(*args, **kwargs)
        depth += 1
        try:
            return watch(part, partial(call, *args, **kwargs))
        finally:
            depth -= 1

    for (part, owner, name), original in zip(seams, originals, strict=True):
        setattr(owner, name, wraps(original)(partial(timed, part, original)))
    try:
        yield
    finally:
        for (_, owner, name), original in zip(seams, originals, strict=True):
            if owner is decoding:
                setattr(owner, name, original)
            else:  # the class has the method
                delattr(owner, name)
