"""Tests of sampled continuations against the target's exact processed distribution.

The first token comes from prefill, and therefore from the target alone. Drafting can distort the
tokens after it: accepted or recovered tokens of the first tree, the bonus token, and the tokens of
later decoding steps. There are three checks:

- *sequence distribution*: whole continuations are counted in cells of the exact joint distribution.
  This check detects any error in likely continuations. If the distribution is flat, however, many
  tokens have no cell of their own.
- *token ranks*: each token is replaced by a number, which is the total probability of all tokens
  that the target finds more likely at this position, plus a random share of the token's own
  probability. Under the target's distribution, these numbers are independent and uniform
  (Rosenblatt's transform), so a single test includes the tokens of all continuations. This check
  detects a preference for more or less likely tokens, the usual effect of faulty acceptance, in
  vocabularies of any size.
- *impossible tokens*: tokens that top-k, top-p or another processor excludes must not occur.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from inference.losslessness.records import Check, VerifySettings
from inference.losslessness.reference import Reference, Tokens

BINS = 10  # of token ranks
MIN_EXPECTED = 5.0  # smallest expected count of a cell; smaller cells are joined
REST = -1  # stands for any token without a cell of its own
OTHER: Tokens = (REST, REST)  # joint cell of all rest cells with a small expected count


class ChiSquare(NamedTuple):
    """Result of a chi-square test."""

    statistic: float
    cells: int
    p_value: float


class SequenceCells:
    """A partition of all continuations into cells of known probability.

    Each likely sequence is a cell. The unlikely tokens after a likely prefix form another cell, the
    rest cell of this prefix. Unlikely rest cells are joined into one. Distributions are needed only
    after likely prefixes, of which there are at most `samples / MIN_EXPECTED` for each length.

    Args:
        length: number of tokens of a continuation that does not end early.
    """

    def __init__(self, reference: Reference, length: int, samples: int) -> None:
        self.expected: dict[Tokens, float] = {OTHER: 0.0}
        self._likely: set[Tokens] = set()
        growing: dict[Tokens, float] = {(): float(samples)}
        for depth in range(1, length + 1):
            likely: dict[Tokens, float] = {}
            for prefix, probs in reference.distributions(list(growing)):
                likely |= self._split(prefix, growing[prefix] * probs)
            self._likely |= likely.keys()
            done = {
                key: value
                for key, value in likely.items()
                if depth == length or reference.ends(key[-1])
            }
            self.expected |= done
            growing = {key: value for key, value in likely.items() if key not in done}

    def _split(self, prefix: Tokens, expected: torch.Tensor) -> dict[Tokens, float]:
        """Return a prefix's likely continuations by one token; add all others to a rest cell."""
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
        return OTHER  # the continuation ended early, but the target would have continued

    def compare(self, sequences: Iterable[Tokens]) -> ChiSquare:
        """Test whether the sequences were sampled from the target's distribution."""
        return chi_square(Counter(map(self.cell_of, sequences)), self.expected)


def compare_with_uniform(numbers: Sequence[float], bins: int) -> ChiSquare:
    """Test whether numbers in [0, 1) were sampled uniformly."""
    counts = Counter(min(int(number * bins), bins - 1) for number in numbers)
    return chi_square(counts, dict.fromkeys(range(bins), len(numbers) / bins))


def chi_square(observed: Counter[Any], expected: Mapping[Any, float]) -> ChiSquare:
    """Return Pearson's chi-square test of counts, after the smallest cells have been joined."""
    pairs = sorted((value, observed[cell]) for cell, value in expected.items())
    while len(pairs) > 1 and pairs[0][0] < MIN_EXPECTED:
        (small, count), (next_small, next_count), *pairs = pairs
        pairs = sorted([*pairs, (small + next_small, count + next_count)])
    statistic = sum(((count - value) ** 2 / value for value, count in pairs if value > 0), 0.0)
    return ChiSquare(statistic, len(pairs), _p_value(statistic, len(pairs) - 1))


def _p_value(statistic: float, degrees: int) -> float:
    if degrees < 1:
        return 1.0
    halves = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def compare_samples(
    reference: Reference,
    sequences: list[Tokens],
    length: int,
    drafted: int,
    number: int,
    settings: VerifySettings,
) -> tuple[Check, Check, Check]:
    """Run the three checks of this module on sampled continuations.

    Args:
        drafted: number of accepted drafts in all continuations.
        number: number of the prompt, from 1.
    """
    cells = SequenceCells(reference, length, len(sequences))
    ranked = _rank_tokens(reference, sequences, settings.seed)

    def distribution(name: str, count: int, unit: str, test: ChiSquare) -> Check:
        return Check(
            name=name,
            passed=test.p_value >= settings.threshold,
            drafted=drafted,
            line=f"prompt {number}: {count} {unit}, {drafted} accepted drafts; chi-square "
            f"{test.statistic:.1f} in {test.cells} cells, p = {test.p_value:.3g} (must be at least "
            f"{settings.threshold:.2g})",
            prompt=number,
            counted=count,
            threshold=settings.threshold,
            **test._asdict(),
        )

    tokens = sum(map(len, sequences))
    uniform = compare_with_uniform(ranked.ranks, BINS)
    return (
        distribution(
            "sequence distribution", len(sequences), "sequences", cells.compare(sequences)
        ),
        distribution("token ranks", len(ranked.ranks), "tokens", uniform),
        Check(
            name="impossible tokens",
            passed=not ranked.impossible,
            drafted=drafted,
            line=f"prompt {number}: {ranked.impossible} of {tokens} tokens, {ranked.at_the_cut} "
            "more may be excluded only because of rounding",
            prompt=number,
            tokens=tokens,
            impossible=ranked.impossible,
            at_the_cut=ranked.at_the_cut,
        ),
    )


class _RankedTokens(NamedTuple):
    """Numbers that replace the tokens of all continuations, and counts of excluded tokens."""

    # uniform in [0, 1) under the target's distribution; the first tokens have no number
    ranks: list[float]
    impossible: int
    at_the_cut: int


def _rank_tokens(reference: Reference, sequences: list[Tokens], seed: int) -> _RankedTokens:
    following: defaultdict[Tokens, Counter[int]] = defaultdict(Counter)
    for sequence in sequences:
        for index, token in enumerate(sequence):
            following[sequence[:index]][token] += 1
    generator = torch.Generator().manual_seed(seed)
    ranks: list[float] = []
    excluded: Counter[bool] = Counter()
    for prefix, probs in reference.distributions(list(following)):
        for token, count in following[prefix].items():
            if probs[token] == 0:
                excluded[reference.is_at_the_cut(prefix, token)] += count
            elif prefix:
                parts = torch.rand(count, dtype=torch.float64, generator=generator).tolist()
                likelier, share = _shares(probs, token)
                ranks += [likelier + share * part for part in parts]
    return _RankedTokens(ranks, impossible=excluded[False], at_the_cut=excluded[True])


def _shares(probs: Float[Tensor, " vocab"], token: int) -> tuple[float, float]:
    """Return the total probability of all tokens ranked before a token, and the token's own."""
    share = probs[token]
    ties_before = probs[:token][probs[:token] == share].sum()
    return float(probs[probs > share].sum() + ties_before), float(share)
