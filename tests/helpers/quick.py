"""Parameters of a test, only some of which belong to the quick tests."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def mostly_slow(values: Iterable[Any], *, quick: Container[Any]) -> list[Any]:
    """Mark all values with `slow` but those that are quick."""
    return [
        value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values
    ]
