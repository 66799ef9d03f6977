"""The table of trigrams: it counts, forgets, and never holds more than its bound."""

import random
from collections import Counter, defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers.trigrams import known_trigrams
from hypothesis import given
from hypothesis import strategies as st

from inference.drafters.aded.table import TrigramCounter, TrigramIndex, TrigramTable

Known = dict[tuple[int, int], dict[int, float]]


class Reference:
    """A table of trigrams made of dictionaries, without a bound on bigrams."""

    def __init__(self, successors: int, max_weight: float) -> None:
        self.successors, self.max_weight = successors, max_weight
        self.rows: Known = defaultdict(dict)

    def add(self, stream: list[int], step: float) -> None:
        """Learn the trigrams of a text."""
        met: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
        for first, second, third in _triples(stream):
            met[first, second][third] += 1
        for bigram, counts in met.items():
            row = dict(self.rows[bigram])
            for token, count in counts.items():
                row[token] = row.get(token, 0.0) + step * count
            row = {token: min(weight, self.max_weight) for token, weight in row.items()}
            order = sorted(row, key=lambda token: (token not in counts, -row[token], token))
            self.rows[bigram] = {token: row[token] for token in order[: self.successors]}


def _add(table: TrigramTable, stream: list[int], step: float = 0.25) -> None:
    table.add(np.array(stream, np.int64), step)


def _assert_same(got: Known, expected: Known) -> None:
    assert got.keys() == expected.keys()
    for bigram, row in expected.items():
        assert got[bigram] == pytest.approx(row, rel=1e-5)


@given(
    streams=st.lists(st.lists(st.integers(0, 6), max_size=40), max_size=6),
    successors=st.integers(1, 5),
)
def test_learning_equals_dictionaries(streams: list[list[int]], successors: int) -> None:
    table = TrigramTable(4096, successors, max_weight=1.5)
    reference = Reference(successors, 1.5)
    for stream in streams:
        _add(table, stream)
        reference.add(stream, 0.25)
    _assert_same(known_trigrams(table), reference.rows)
    for (first, second), row in reference.rows.items():
        assert table.row(first, second) == pytest.approx(row, rel=1e-5)


@given(streams=st.lists(st.lists(st.integers(0, 9), max_size=60), max_size=4))
def test_counting_equals_dictionaries(streams: list[list[int]]) -> None:
    counter = TrigramCounter()
    counts: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for stream in streams:
        counter.add(np.array(stream, np.int64))
        for first, second, third in _triples(stream):
            counts[first, second][third] += 1
    shares = {
        bigram: {token: count / row.total() for token, count in row.items()}
        for bigram, row in counts.items()
    }
    _assert_same(known_trigrams(counter.index(1000, 10)), shares)


def test_counting_keeps_the_most_frequent_bigrams_and_successors() -> None:
    counter = TrigramCounter(max_trigrams=3)
    counter.add(np.array([1, 2, 3] * 9 + [1, 2, 4] * 3 + [7, 8, 9], np.int64))
    known = known_trigrams(counter.index(max_bigrams=2, num_successors=1))
    assert len(known) == 2
    assert all(len(row) == 1 for row in known.values())
    assert 3 in known[1, 2]
    assert (7, 8) not in known


def test_the_bigram_that_was_learnt_from_the_longest_ago_makes_way() -> None:
    table = TrigramTable(3)
    for stream in ([1, 1, 5], [2, 2, 5], [3, 3, 5], [1, 1, 5], [4, 4, 5]):
        _add(table, stream)
    assert known_trigrams(table).keys() == {(1, 1), (3, 3), (4, 4)}


def test_learning_goes_on_from_what_was_known_before_and_leaves_it_alone() -> None:
    counter = TrigramCounter()
    counter.add(np.array([1, 2, 3, 1, 2, 4, 9, 9, 9], np.int64))
    index = counter.index(100)
    before = known_trigrams(index)
    table = TrigramTable(8, below=index)
    _add(table, [1, 2, 3])
    assert known_trigrams(table) == before | {(1, 2): {3: 0.75, 4: 0.5}}
    assert table.row(9, 9) == index.row(9, 9)
    assert known_trigrams(index) == before
    table.clear()
    assert known_trigrams(table) == before


@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=9),
    width=st.integers(7, 8),
    count=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_rows_below_are_cut_to_their_heaviest_successors(
    lengths: list[int], width: int, count: int, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    ids = np.full((len(lengths), width), -1, np.int32)
    weights = np.zeros(ids.shape, np.float32)
    for number, length in enumerate(lengths):
        ids[number, :length] = draw.permutation(20)[:length]
        weights[number, :length] = draw.integers(1, 4, length) / 4  # many weights are equal
    index = TrigramIndex(np.arange(len(lengths)), ids, weights)  # bigrams (0, n)
    table = TrigramTable(64, num_successors=count, below=index)
    for number, length in enumerate(lengths):
        row = [*index.row(0, number).items()]
        expected = sorted(row, key=lambda pair: -pair[1])[:count] if length > count else row
        assert [*table.row(0, number).items()] == expected


def test_many_threads_learn_into_one_table() -> None:
    table = TrigramTable(4096, num_successors=4, max_weight=1e9)

    def learn(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(60):
            _add(table, [1, 2, 3])
            _add(table, [draw.randrange(30) + 4 for _ in range(12)])
            table.row(draw.randrange(9), draw.randrange(9))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(learn, range(8)))
    assert table.row(1, 2) == pytest.approx({3: 0.25 * 60 * 8})
    assert all(len(row) <= 4 for row in known_trigrams(table).values())


def test_large_tokens_are_distinguished() -> None:
    top = (1 << 21) - 1
    table = TrigramTable(8)
    _add(table, [top, top, top, 0, top])
    known = {(top, top): {top: 0.25, 0: 0.25}, (top, 0): {top: 0.25}}
    assert known_trigrams(table) == known


def _triples(stream: list[int]) -> Iterable[tuple[int, int, int]]:
    return zip(stream, stream[1:], stream[2:], strict=False)
