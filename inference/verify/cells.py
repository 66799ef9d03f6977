"""Chi-square tests: continuations sorted into cells, counts beside expectations."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from inference.verify.reference import Reference, Tokens

MIN_EXPECTED = 5.0  # a cell that expects less is joined with others
REST = -1  # in the place of a token: any that has no cell of its own
OTHER: Tokens = (REST, REST)  # the rests that are too small to stand alone


class ChiSquare(NamedTuple):
    """Result of a test."""

    statistic: float
    cells: int
    p_value: float


class SequenceCells:
    """A partition of all continuations into cells of known probability.

    A likely sequence is a cell; the unlikely tokens after a likely prefix together are one, too;
    what is unlikely even so is joined in the last one. Laws are needed after likely prefixes only,
    at most `samples / MIN_EXPECTED` for each length.

    Args:
        reference: knows the laws.
        length: of a continuation that does not end before.
        samples: how many will be drawn.
    """

    def __init__(self, reference: Reference, length: int, samples: int) -> None:
        self.expected: dict[Tokens, float] = {OTHER: 0.0}
        self._likely: set[Tokens] = set()
        growing: dict[Tokens, float] = {(): float(samples)}
        for depth in range(1, length + 1):
            likely: dict[Tokens, float] = {}
            for prefix, law in reference.laws(list(growing)):
                likely |= self._split(prefix, growing[prefix] * law)
            self._likely |= likely.keys()
            done = {
                key: value
                for key, value in likely.items()
                if depth == length or reference.ends(key[-1])
            }
            self.expected |= done
            growing = {key: value for key, value in likely.items() if key not in done}

    def _split(self, prefix: Tokens, expected: torch.Tensor) -> dict[Tokens, float]:
        """Return a prefix's likely continuations by one token; put the others into a cell."""
        tokens = (expected >= MIN_EXPECTED).nonzero()[:, 0]
        rest = float(expected.sum() - expected[tokens].sum())
        cell = (*prefix, REST) if rest >= MIN_EXPECTED else OTHER
        self.expected[cell] = self.expected.get(cell, 0.0) + max(rest, 0.0)
        pairs = zip(tokens.tolist(), expected[tokens].tolist(), strict=True)
        return {(*prefix, token): value for token, value in pairs}

    def cell_of(self, sequence: Tokens) -> Tokens:
        """Return the cell that a continuation falls into."""
        for length in range(1, len(sequence) + 1):
            prefix = sequence[:length]
            if prefix in self.expected:
                return prefix
            if prefix not in self._likely:
                rest = (*prefix[:-1], REST)
                return rest if rest in self.expected else OTHER
        return OTHER  # it ended early, where the target would have gone on

    def compare(self, sequences: Iterable[Tokens]) -> ChiSquare:
        """Test whether the sequences were drawn from the target's law."""
        return chi_square(Counter(map(self.cell_of, sequences)), self.expected)


def compare_with_uniform(numbers: Sequence[float], bins: int) -> ChiSquare:
    """Test whether numbers in [0, 1) were drawn uniformly."""
    counts = Counter(min(int(number * bins), bins - 1) for number in numbers)
    return chi_square(counts, dict.fromkeys(range(bins), len(numbers) / bins))


def chi_square(observed: Counter[Any], expected: Mapping[Any, float]) -> ChiSquare:
    """Return Pearson's test of counts, after the smallest cells have been joined."""
    pairs = sorted((value, observed[cell]) for cell, value in expected.items())
    while len(pairs) > 1 and pairs[0][0] < MIN_EXPECTED:
        (small, count), (next_small, next_count), *pairs = pairs
        pairs = sorted([*pairs, (small + next_small, count + next_count)])
    statistic = sum((count - value) ** 2 / value for value, count in pairs if value > 0)
    return ChiSquare(statistic, len(pairs), _p_value(statistic, len(pairs) - 1))


def _p_value(statistic: float, degrees: int) -> float:
    if degrees < 1:
        return 1.0
    halves = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))
