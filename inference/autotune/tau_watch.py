"""A warning when a drafter's tau in use is far below the tau in the drafter's evaluation."""

from threading import Lock
from typing import Any

from transformers import TemperatureLogitsWarper

from inference.engine.loop import DecodeRun
from inference.engine.stats import DecodeStats
from inference.sampling.options import Sampling
from jakiro.utils.logs import get_logger

ENOUGH = 256  # smallest number of decoding steps before a warning
# A warning is written if fewer drafts are accepted per step than this share of their number in the
# evaluation.
FAR_BELOW = 0.6

_logger = get_logger(__name__)


class TauWatch:
    """Compares the tau in use with the tau in a drafter's training record, and warns once."""

    def __init__(self, record: dict[str, Any] | None) -> None:
        decoding = ((record or {}).get("evaluation") or {}).get("decoding") or []
        self._expected = {
            float(figures["temperature"]): float(figures["tau"]) for figures in decoding
        }
        self._live: dict[float, DecodeStats] = {}
        self._lock = Lock()
        self._has_warned = False

    def add(self, run: DecodeRun) -> None:
        """Include a finished run, if its temperature was part of the drafter's evaluation."""
        temperature = _temperature(run.sequences[0].request.sampling)
        expected = self._expected.get(temperature)
        if expected is None:
            return
        with self._lock:
            before = self._live.get(temperature, DecodeStats(from_prefill=0))
            live = self._live[temperature] = DecodeStats.pooled([before, run.stats])
            is_low = live.tau - 1 < FAR_BELOW * (expected - 1)
            if self._has_warned or live.target_forwards < ENOUGH or not is_low:
                return
            self._has_warned = True
        _logger.warning(
            "the mean acceptance length (tau) is far below that in the drafter's evaluation: got "
            "%.2f over %d decoding steps, expected %.2f; check the chat template, the kind of "
            "prompts, and the target",
            live.tau,
            live.target_forwards,
            expected,
        )


def _temperature(sampling: Sampling) -> float:
    if not sampling.do_sample:
        return 0.0
    processors = [
        processor
        for processor in sampling.processors
        if isinstance(processor, TemperatureLogitsWarper)
    ]
    return float(processors[0].temperature) if processors else 1.0
