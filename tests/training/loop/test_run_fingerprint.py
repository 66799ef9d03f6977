"""Runs are compared by what determines their results."""

from typing import Any

import pytest

from training.loop.run_fingerprint import difference, is_longer


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ({"steps": 2}, {"steps": 3}, True),
        ({"steps": 3}, {"steps": 2}, False),
        ({"steps": 2}, {"steps": 2}, False),
        ({"epochs": 1.0}, {"epochs": 2.5}, True),
        ({"epochs": 1.0}, {"steps": 900}, False),
        ({"epochs": 1.0, "steps": 20}, {"epochs": 1.0}, True),
        ({"steps": 9, "minutes": 2.0}, {"steps": 9}, True),
        ({"steps": 9}, {"steps": 9, "minutes": 2.0}, False),
        ({"steps": 9, "minutes": 2.0}, {"steps": 8, "minutes": 3.0}, False),
        ({"steps": 2}, {"steps": 3, "seed": 1}, False),
    ],
)
def test_a_longer_run_has_only_higher_limits(
    before: dict[str, Any], now: dict[str, Any], expected: bool
) -> None:
    assert is_longer({"settings": before}, {"settings": now}) == expected


def test_the_first_difference_is_named_with_both_values() -> None:
    recorded = {"settings": {"seed": 1, "data": {"shuffle": True}}, "data_fingerprint": "a"}
    assert difference(recorded, recorded) is None
    other = recorded | {"data_fingerprint": "b"}
    assert difference(recorded, other) == ("data_fingerprint", "a", "b")
    other = recorded | {"settings": {"seed": 1, "data": {"shuffle": False}}}
    assert difference(recorded, other) == ("data.shuffle", True, False)
