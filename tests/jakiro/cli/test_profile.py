"""`jakiro profile`: unusable options are refused before anything is measured."""

import pytest
from helpers.commands import exit_code


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("engine", "--only", "nonsense"), "--only"),
        (("engine", "--repeats", "0"), "--repeats"),
        (("automatic", "--count", "0"), "--count"),
        (("rounding", "--new-tokens", "0"), "--new-tokens"),
    ],
)
def test_an_unusable_value_is_refused_with_the_option_as_typed(
    words: tuple[str, ...], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("profile", *words) == 2
    assert f"unusable value for '{option}" in capsys.readouterr().err
