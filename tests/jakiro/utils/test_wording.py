"""A noun in a message agrees with its number."""

from jakiro.utils.wording import counted


def test_a_noun_agrees_with_its_number() -> None:
    numbers = (0, 1, 2, 1000)
    assert [counted(number, "step") for number in numbers] == [
        "0 steps",
        "1 step",
        "2 steps",
        "1,000 steps",
    ]


def test_a_plural_that_does_not_end_in_s_is_given() -> None:
    assert [counted(number, "process", "processes") for number in (1, 2)] == [
        "1 process",
        "2 processes",
    ]
