"""A noun in a message agrees with its number, and an error is summarized in one line."""

import pytest

from jakiro.utils.wording import counted, rounded, summary_of


def test_a_noun_agrees_with_its_number() -> None:
    numbers = (0, 1, 2, 1000)
    assert [counted(number, "step") for number in numbers] == [
        "0 steps",
        "1 step",
        "2 steps",
        "1,000 steps",
    ]


def test_a_rounded_number_has_three_digits_and_a_suffix() -> None:
    numbers = (999, 1000, 135_400_000, 999_999, 1_500_000_000)
    assert [rounded(number) for number in numbers] == ["999", "1.00k", "135M", "1.00M", "1.50B"]


@pytest.mark.parametrize(
    ("text", "summary"),
    [
        ("first\nsecond", "first"),
        ("one of: \n (1) a, \n (2) b", "one of: (1) a, (2) b"),
        ("one of:", "one of:"),
        ("", "ValueError"),
    ],
)
def test_an_error_is_summarized_in_one_line(text: str, summary: str) -> None:
    assert summary_of(ValueError(text)) == summary
