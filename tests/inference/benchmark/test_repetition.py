"""The share of repeated n-grams counts only repetition within a text."""

import pytest

from inference.benchmark.figures import repeated_ngram_share


@pytest.mark.parametrize(
    ("texts", "share"),
    [
        ([[1, 2, 3, 4, 5, 6, 7]], 0.0),
        ([[1, 1, 1, 1, 1, 1, 1]], 0.75),  # one of the four n-grams is new
        ([[1, 2, 3, 4], [1, 2, 3, 4]], 0.0),  # other texts do not count
        ([[1, 2, 3, 4, 1, 2, 3, 4], [9]], 0.2),
        ([[1, 2, 3]], 0.0),
        ([], 0.0),
    ],
)
def test_only_ngrams_seen_before_in_the_same_text_are_repeated(
    texts: list[list[int]], share: float
) -> None:
    assert repeated_ngram_share(texts) == pytest.approx(share)
