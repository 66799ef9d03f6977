"""A noun agrees with its number, dtypes have two names, and an error is summarized in one line."""

import pytest
import torch

from jakiro.utils.pretrained import TORCH_DTYPES
from jakiro.utils.wording import (
    SHORT_NAMES,
    counted,
    long_dtype,
    rounded,
    short_dtype,
    summary_of,
)


def test_numbers_agree_with_their_nouns_and_are_rounded() -> None:
    words = ["0 steps", "1 step", "2 steps", "1,000 steps"]
    assert [counted(number, "step") for number in (0, 1, 2, 1000)] == words
    numbers = (999, 1000, 135_400_000, 999_999, 1_500_000_000)
    assert [rounded(number) for number in numbers] == ["999", "1.00k", "135M", "1.00M", "1.50B"]


def test_each_name_of_a_dtype_becomes_the_other_and_the_same_dtype() -> None:
    for long, short in SHORT_NAMES.items():
        assert long_dtype(short) == long_dtype(long) == long
        assert short_dtype(long) == short_dtype(short) == short
        assert TORCH_DTYPES[long] is TORCH_DTYPES[short] is getattr(torch, long)
    assert long_dtype("auto") == short_dtype("auto") == "auto"


@pytest.mark.parametrize(
    ("text", "summary"),
    [
        ("first\nsecond", "first"),
        ("one of: \n (1) a, \n (2) b", "one of: (1) a, (2) b"),
        ("", "ValueError"),
    ],
)
def test_an_error_is_summarized_in_one_line(text: str, summary: str) -> None:
    assert summary_of(ValueError(text)) == summary
