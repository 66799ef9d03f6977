"""Comparison of sequences, such as texts and token ids."""

from collections.abc import Sequence


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the length of the longest beginning that two sequences have in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))
