"""Computes exact distributions by running random code once for each sequence of choices."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Outcome = TypeVar("Outcome", bound=Hashable)


class Chooser:
    """Replaces a random generator: replays a script, then always makes the first choice.

    Args:
        script: choices to replay; each is an index among the outcomes with positive probability.
    """

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.taken: list[tuple[int, int]] = []  # (choice, number of possible choices)
        self.probability = 1.0

    def choose(self, probabilities: Sequence[float]) -> int:
        """Return the index of the outcome that this run chooses."""
        possible = [index for index, probability in enumerate(probabilities) if probability > 0]
        choice = self.script[len(self.taken)] if len(self.taken) < len(self.script) else 0
        self.taken.append((choice, len(possible)))
        self.probability *= probabilities[possible[choice]]
        return possible[choice]

    def accept(self, probability: float) -> bool:
        """Return whether this run accepts a candidate with this probability of acceptance."""
        return self.choose([probability, 1.0 - probability]) == 0


def distribution_of(experiment: Callable[[Chooser], Outcome]) -> dict[Outcome, float]:
    """Return the exact distribution of an experiment's outcome, from all sequences of choices."""
    probs: defaultdict[Outcome, float] = defaultdict(float)
    script: list[int] | None = []
    while script is not None:
        chooser = Chooser(script)
        outcome = experiment(chooser)
        probs[outcome] += chooser.probability
        script = _next_script(chooser.taken)
    return dict(probs)


def _next_script(taken: list[tuple[int, int]]) -> list[int] | None:
    """Return the script of the run after the one that made these choices; None after the last."""
    choices = list(taken)
    while choices and choices[-1][0] + 1 == choices[-1][1]:
        choices.pop()
    if not choices:
        return None
    last, _ = choices.pop()
    return [choice for choice, _ in choices] + [last + 1]
