"""The law of sampled continuations beside the target's exact processed law.

The first token comes from prefill, the target alone; what drafting could bend are the tokens after
it: those of the first tree, accepted or corrected, the bonus token below it, and later rounds.
Three checks look at them:

- *sequence law*: counts of whole continuations in cells of the exact joint law. It sees any fault
  in likely continuations; a spread law leaves many tokens without a cell of their own.
- *token ranks*: each token becomes the share of the target's law, given the tokens before it, that
  is likelier than it, plus a uniform part of its own share. Under the target's law these numbers
  are independent and uniform whatever came before (Rosenblatt's transform), so the tokens of all
  continuations join in one test. It sees likelier or unlikelier tokens preferred, which is what
  faulty acceptance does, however large the vocabulary.
- *impossible tokens*: none may occur that top-k, top-p or another processor excludes.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from inference.decoder import SpeculativeDecoder
from inference.losslessness.records import DistributionCheck, SupportCheck, VerifySettings
from inference.losslessness.reference import Reference, Tokens

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


BINS = 10


class Sample(NamedTuple):
    """One drawn continuation."""

    token_ids: Tokens
    drafted: int  # how many of them a draft won


def draw_samples(
    decoder: SpeculativeDecoder, prompt_ids: list[int], settings: VerifySettings
) -> list[Sample]:
    """Draw independent continuations through the decoder, each with a seed of its own."""
    length = sample_length(decoder, settings)
    outputs = (
        decoder.generate(
            prompt_ids,
            seed=settings.seed * settings.samples + index,
            max_new_tokens=length,
            **settings.sampling,
        )
        for index in range(settings.samples)
    )
    return [
        Sample(tuple(one.new_token_ids), sum(depth > 0 for depth in one.depths)) for one in outputs
    ]


def sample_length(decoder: SpeculativeDecoder, settings: VerifySettings) -> int:
    """Return the tokens of a sample: by default root, tree levels, bonus token."""
    if settings.sample_length is not None:
        return settings.sample_length
    return 2 + (decoder.drafter.max_depth if decoder.drafter is not None else 1)


def check_sampled(
    decoder: SpeculativeDecoder,
    prompt_ids: list[int],
    settings: VerifySettings,
    number: int,
    threshold: float,
) -> tuple[DistributionCheck, DistributionCheck, SupportCheck]:
    """Draw continuations of one prompt and test them; see the module.

    Args:
        decoder: draws.
        prompt_ids: the prompt.
        settings: how many and how.
        number: of the prompt, for the report.
        threshold: a p-value below it fails.

    Raises:
        PromptError: the prompt cannot be continued, or not as the settings ask.
    """
    samples = draw_samples(decoder, prompt_ids, settings)
    sequences = [sample.token_ids for sample in samples]
    drafted = sum(sample.drafted for sample in samples)
    reference = Reference(decoder.target.model, prompt_ids, settings.sampling)
    cells = SequenceCells(reference, sample_length(decoder, settings), len(samples))
    places = _place(reference, sequences, settings.seed)

    shared = {"prompt": number, "drafted": drafted, "threshold": threshold}
    by_cell = cells.compare(sequences)._asdict()
    by_rank = compare_with_uniform(places.ranks, BINS)._asdict()
    return (
        DistributionCheck(name="sequence law", counted=len(samples), **shared, **by_cell),
        DistributionCheck(name="token ranks", counted=len(places.ranks), **shared, **by_rank),
        SupportCheck(
            prompt=number,
            tokens=sum(map(len, sequences)),
            impossible=places.impossible,
            at_the_cut=places.at_the_cut,
        ),
    )


class _Places(NamedTuple):
    """Where the tokens of all continuations stand in the target's laws."""

    ranks: list[float]  # uniform in [0, 1) under these laws; without the first tokens
    impossible: int
    at_the_cut: int


def _place(reference: Reference, sequences: list[Tokens], seed: int) -> _Places:
    following: defaultdict[Tokens, Counter[int]] = defaultdict(Counter)
    for sequence in sequences:
        for place, token in enumerate(sequence):
            following[sequence[:place]][token] += 1
    generator = torch.Generator().manual_seed(seed)
    ranks: list[float] = []
    excluded: Counter[bool] = Counter()
    for prefix, probs in reference.distributions(list(following)):
        for token, count in following[prefix].items():
            if probs[token] == 0:
                excluded[reference.is_at_the_cut(prefix, token)] += count
            elif prefix:
                parts = torch.rand(count, dtype=torch.float64, generator=generator).tolist()
                likelier, own = _shares(probs, token)
                ranks += [likelier + own * part for part in parts]
    return _Places(ranks, impossible=excluded[False], at_the_cut=excluded[True])


def _shares(probs: Float[Tensor, " vocab"], token: int) -> tuple[float, float]:
    """Return the probability of all tokens before one in the order of the law, and its own."""
    own = probs[token]
    ties_before = probs[:token][probs[:token] == own].sum()
    return float(probs[probs > own].sum() + ties_before), float(own)
