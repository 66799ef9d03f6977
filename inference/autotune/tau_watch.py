"""Notices when a drafter does far worse in use than in its own evaluation."""

from threading import Lock
from typing import Any

from transformers import TemperatureLogitsWarper

from inference.engine.loop import DecodeRun
from inference.engine.stats import DecodeStats
from inference.sampling import Sampling
from jakiro.utils.logs import get_logger

ENOUGH = 256  # rounds before judging
FAR_BELOW = 0.6  # of what each round should win beyond the target's own token

_logger = get_logger(__name__)


class TauWatch:
    """Compares tau in use with the one in a drafter's record; warns once.

    Args:
        record: what a checkpoint says of itself, as written by training.
    """

    def __init__(self, record: dict[str, Any] | None) -> None:
        decoding = ((record or {}).get("evaluation") or {}).get("decoding") or []
        self._expected = {float(one["temperature"]): float(one["tau"]) for one in decoding}
        self._live: dict[float, DecodeStats] = {}
        self._lock = Lock()
        self._has_warned = False

    def add(self, run: DecodeRun) -> None:
        """Take in a finished run, if it sampled as in the evaluation."""
        temperature = _temperature(run.sequences[0].request.sampling)
        expected = self._expected.get(temperature)
        if expected is None:
            return
        with self._lock:
            before = self._live.get(temperature, DecodeStats(prefilled=0))
            live = self._live[temperature] = DecodeStats.pooled([before, run.stats])
            is_low = live.tau - 1 < FAR_BELOW * (expected - 1)
            if self._has_warned or live.target_forwards < ENOUGH or not is_low:
                return
            self._has_warned = True
        _logger.warning(
            "the drafter wins far less than in its own evaluation: tau %.2f over %d rounds, "
            "expected %.2f; wrong chat template, other kinds of prompts, or a changed target?",
            live.tau,
            live.target_forwards,
            expected,
        )


def _temperature(sampling: Sampling) -> float:
    if not sampling.do_sample:
        return 0.0
    warpers = [one for one in sampling.processors if isinstance(one, TemperatureLogitsWarper)]
    return float(warpers[0].temperature) if warpers else 1.0
