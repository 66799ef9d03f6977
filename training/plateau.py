"""Notices when drafting gains nothing of what training learns."""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jakiro.logs import get_logger

NUM_COMPARED = 3  # evaluations: the latest, and those before
LEARNT = 0.01  # rise of agreement that counts as learning

_logger = get_logger(__name__)


class _Point(NamedTuple):
    step: int
    agreement: float
    tau: float


class PlateauWatch:
    """Compares what a drafter knows of given text with what its drafts win; warns once a plateau.

    Agreement is that of the first level with the target on held-out text, so it is measured where
    every token before is right; tau is that of the decode loop at the first temperature.

    Args:
        earlier: the run's evaluations before, in order; nothing is said of them again.
    """

    def __init__(self, earlier: Iterable[tuple[int, Mapping[str, Any]]] = ()) -> None:
        self._points: deque[_Point] = deque(maxlen=NUM_COMPARED)
        self._is_flat = False
        for step, evaluation in earlier:
            self._take(step, evaluation)

    def add(self, step: int, evaluation: Mapping[str, Any]) -> None:
        """Look at an evaluation; warn if a plateau begins with it."""
        was_flat = self._is_flat
        self._take(step, evaluation)
        if self._is_flat and not was_flat:
            self._warn()

    def _take(self, step: int, evaluation: Mapping[str, Any]) -> None:
        """Remember an evaluation; one without held-out text or prompts has nothing to compare."""
        if "held_out" not in evaluation or "decoding" not in evaluation:
            return
        agreement = evaluation["held_out"]["levels"][0]["agreement"]
        self._points.append(_Point(step, agreement, evaluation["decoding"][0]["tau"]))
        first, last = self._points[0], self._points[-1]
        has_learnt = last.agreement >= first.agreement + LEARNT
        is_enough = len(self._points) == NUM_COMPARED
        self._is_flat = is_enough and has_learnt and last.tau <= first.tau

    def _warn(self) -> None:
        first, last = self._points[0], self._points[-1]
        _logger.warning(
            f"from step {first.step} to {last.step} agreement on held-out text rose from "
            f"{first.agreement:.3f} to {last.agreement:.3f}, but tau went from {first.tau:.2f} to "
            f"{last.tau:.2f}: look at whether training sees the distances of drafting "
            "(batch.anchors, trunk.rollout_steps), whether evaluation.prompts and their chat "
            "template are like the data, acceptance by depth, and whether evaluation.num_prompts "
            "and max_new_tokens are too few to tell"
        )
