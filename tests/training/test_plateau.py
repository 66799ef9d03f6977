"""A drafter that learns what drafting does not gain from is noticed, once for each plateau."""

from typing import Any

import pytest

from training.plateau import PlateauWatch


def _evaluation(agreement: float, tau: float) -> dict[str, Any]:
    return {
        "held_out": {"levels": [{"agreement": agreement}]},
        "decoding": [{"temperature": 0.0, "tau": tau}],
    }


def _watched(watch: PlateauWatch, points: list[tuple[float, float]], start: int = 0) -> None:
    for number, (agreement, tau) in enumerate(points, start=start):
        watch.add(100 * number, _evaluation(agreement, tau))


PLATEAU = [(0.1, 1.30), (0.2, 1.31), (0.3, 1.29)]


def test_agreement_that_rises_without_tau_is_warned_of_with_the_numbers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _watched(PlateauWatch(), PLATEAU)
    (record,) = caplog.records
    said = record.getMessage()
    assert "from step 0 to 200" in said
    assert "rose from 0.100 to 0.300" in said
    assert "tau went from 1.30 to 1.29" in said
    assert "batch.anchors" in said


@pytest.mark.parametrize(
    "points",
    [
        [(0.1, 1.3), (0.2, 1.3), (0.3, 1.4)],  # drafts win, too
        [(0.3, 1.3), (0.3, 1.3), (0.3, 1.3)],  # nothing is learnt
        [(0.3, 1.3), (0.2, 1.2), (0.1, 1.1)],
        [(0.1, 1.3), (0.3, 1.2)],  # too early to tell
    ],
)
def test_nothing_is_said_without_a_plateau(
    points: list[tuple[float, float]], caplog: pytest.LogCaptureFixture
) -> None:
    _watched(PlateauWatch(), points)
    assert not caplog.records


def test_a_plateau_is_warned_of_once_and_the_next_one_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = PlateauWatch()
    _watched(watch, [*PLATEAU, (0.4, 1.28), (0.5, 1.27)])
    assert len(caplog.records) == 1
    _watched(watch, [(0.5, 1.9), (0.5, 1.9), (0.5, 1.9), (0.6, 1.8)], start=5)
    assert len(caplog.records) == 2


def test_a_resumed_run_does_not_say_again_what_it_said(caplog: pytest.LogCaptureFixture) -> None:
    earlier = [(100 * number, _evaluation(*point)) for number, point in enumerate(PLATEAU)]
    watch = PlateauWatch(earlier)
    watch.add(300, _evaluation(0.4, 1.28))
    assert not caplog.records


def test_without_held_out_text_or_prompts_there_is_nothing_to_compare(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = PlateauWatch()
    for step, (agreement, tau) in enumerate(PLATEAU):
        both = _evaluation(agreement, tau)
        watch.add(step, {"held_out": both["held_out"]})
        watch.add(step, {"decoding": both["decoding"]})
    assert not caplog.records
