"""The fractions of a learning curve are read from text."""

import pytest

from jakiro.cli.training_settings import parse_fractions
from jakiro.errors import ConfigError


def test_fractions_are_sorted() -> None:
    assert parse_fractions("1,0.5") == [0.5, 1.0]


@pytest.mark.parametrize("text", ["1", "0,1", "0.5,2", "half,all", "0.5,0.5"])
def test_fractions_that_do_not_make_a_curve_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="needs fractions of the documents"):
        parse_fractions(text)
