"""The length of a common beginning, for texts and for lists."""

import pytest

from jakiro.utils.sequences import common_length


@pytest.mark.parametrize(
    ("first", "second", "length"),
    [("abc", "abd", 2), ("abc", "abc", 3), ("ab", "abc", 2), ("", "a", 0), ([1, 2], [3, 2], 0)],
)
def test_the_common_beginning_ends_at_the_first_difference(
    first: str | list[int], second: str | list[int], length: int
) -> None:
    assert common_length(first, second) == length
