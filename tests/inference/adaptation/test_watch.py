"""A drafter that accepts fewer drafts is found, and an equal one is left alone."""

import numpy as np

from inference.adaptation.watch import LOOKS, AcceptanceWatch


def _requests(tau: float, count: int, seed: int) -> list[tuple[int, int]]:
    random = np.random.default_rng(seed)
    steps = random.integers(10, 30, count)
    return [
        (int(number) + int(random.binomial(4 * number, (tau - 1) / 4)), int(number))
        for number in steps
    ]


def _outcome(before: float, after: float, seed: int) -> str:
    watch = AcceptanceWatch()
    for request in _requests(before, LOOKS[-1], seed):
        assert watch.add(*request) == "waiting"
    watch.changed(watch=True)
    assert watch.is_watching
    findings = [watch.add(*request) for request in _requests(after, LOOKS[-1], seed + 1000)]
    assert not watch.is_watching
    return next(finding for finding in findings if finding != "waiting")


def test_a_drafter_that_is_clearly_worse_is_always_found() -> None:
    assert {_outcome(3.0, 2.4, seed) for seed in range(50)} == {"worse"}


def test_an_equal_drafter_is_hardly_ever_called_worse() -> None:
    worse = sum(_outcome(3.0, 3.0, seed) == "worse" for seed in range(400))
    assert worse <= 16  # one percent is expected


def test_a_better_drafter_is_kept() -> None:
    assert {_outcome(2.4, 3.0, seed) for seed in range(50)} == {"good"}
