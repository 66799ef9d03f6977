"""The table of trigrams: it counts, forgets, and never holds more than its bound."""

import random
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessorList

from inference.drafters.aded.drafter import AdedDrafter, AdedSettings, TrigramProposer
from inference.drafters.aded.file import TrigramCounter
from inference.drafters.aded.index import (
    Successors,
    TrigramIndex,
    check_vocabulary,
    packed,
    successors_at,
    trigrams_of,
)
from inference.drafters.aded.table import TrigramTable
from inference.sampling.options import Sampling
from jakiro.errors import ConfigError

Known = dict[tuple[int, int], dict[int, float]]


class Reference:
    """A table of trigrams made of dictionaries, without a bound on bigrams."""

    def __init__(self, successors: int, max_weight: float, decay: float) -> None:
        self.successors, self.max_weight, self.decay = successors, max_weight, decay
        self.rows: Known = defaultdict(dict)

    def add(self, stream: list[int], step: float) -> None:
        """Learn the trigrams of a text."""
        met: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
        for first, second, third in _triples(stream):
            met[first, second][third] += 1
        for bigram, counts in met.items():
            row = {token: weight * self.decay for token, weight in self.rows[bigram].items()}
            for token, count in counts.items():
                row[token] = row.get(token, 0.0) + step * count
            row = {token: min(weight, self.max_weight) for token, weight in row.items()}
            order = sorted(row, key=lambda token: (token not in counts, -row[token], token))
            self.rows[bigram] = {token: row[token] for token in order[: self.successors]}


def _add(table: TrigramTable, stream: list[int], step: float = 0.25) -> None:
    bigrams, successors = trigrams_of(np.array(stream, np.int64))
    table.add(bigrams, successors, np.full(len(bigrams), step, np.float32))


def _rows(index: TrigramIndex) -> Known:
    return dict(index.items())


def _assert_same(got: Known, expected: Known) -> None:
    assert got.keys() == expected.keys()
    for bigram, row in expected.items():
        assert got[bigram] == pytest.approx(row, rel=1e-5)


@given(
    streams=st.lists(st.lists(st.integers(0, 6), max_size=40), max_size=6),
    successors=st.integers(1, 5),
    decay=st.sampled_from([1.0, 0.5, 0.9]),
)
def test_learning_equals_dictionaries(
    streams: list[list[int]], successors: int, decay: float
) -> None:
    table = TrigramTable(4096, successors, max_weight=1.5, decay=decay)
    reference = Reference(successors, 1.5, decay)
    for stream in streams:
        _add(table, stream)
        reference.add(stream, 0.25)
    _assert_same(_rows(table.frozen()), reference.rows)
    for (first, second), row in reference.rows.items():
        tokens, weights = table.row(first, second)
        assert dict(zip(tokens, weights, strict=True)) == pytest.approx(row, rel=1e-5)


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
    _assert_same(_rows(counter.index(1000, 10)), shares)


def test_counting_keeps_the_most_frequent_bigrams_and_successors() -> None:
    counter = TrigramCounter(max_trigrams=3)
    counter.add(np.array([1, 2, 3] * 9 + [1, 2, 4] * 3 + [7, 8, 9], np.int64))
    known = _rows(counter.index(max_bigrams=2, num_successors=1))
    assert len(known) == 2
    assert all(len(row) == 1 for row in known.values())
    assert 3 in known[1, 2]
    assert (7, 8) not in known


@pytest.mark.parametrize("bound", [1, 5, 8, 64])
def test_a_table_never_holds_more_than_its_bound(bound: int) -> None:
    table = TrigramTable(bound, num_successors=3)
    num_bytes = table.num_bytes
    draw = random.Random(bound)
    for _ in range(200):
        _add(table, [draw.randrange(50) for _ in range(30)])
        assert 1 <= table.num_bigrams <= bound
        assert all(len(row) <= 3 for row in _rows(table.frozen()).values())
    assert table.num_bytes == num_bytes


def test_the_bigram_that_was_learnt_from_the_longest_ago_makes_way() -> None:
    table = TrigramTable(3)
    for stream in ([1, 1, 5], [2, 2, 5], [3, 3, 5], [1, 1, 5], [4, 4, 5]):
        _add(table, stream)
    assert _rows(table.frozen()).keys() == {(1, 1), (3, 3), (4, 4)}


def test_what_was_just_seen_takes_the_place_of_the_lightest_successor() -> None:
    table = TrigramTable(8, num_successors=2)
    for successor in (5, 5, 6, 7):
        _add(table, [1, 2, successor])
    assert _rows(table.frozen()) == {(1, 2): {5: 0.5, 7: 0.25}}


def test_one_bigram_of_many_successors_takes_no_more_memory_than_others() -> None:
    table = TrigramTable(max_bigrams=1024, num_successors=4)
    tracemalloc.start()
    _add(table, [token for number in range(6000) for token in (1, 2, 10 + number)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50e6
    assert table.row(1, 2)[0] == [10, 11, 12, 13]


def test_weights_stop_at_their_maximum_and_decay_when_others_are_seen() -> None:
    table = TrigramTable(8, max_weight=1.0, decay=0.5)
    for successor in (3, 3, 3, 3, 3, 3, 4):
        _add(table, [1, 2, successor], step=0.75)
    assert _rows(table.frozen())[1, 2] == pytest.approx({3: 0.5, 4: 0.75})


@pytest.mark.parametrize("nothing", [0.0, -0.5, float("nan")])
def test_amounts_that_are_none_teach_nothing(nothing: float) -> None:
    table = TrigramTable(8, num_successors=2)
    _add(table, [1, 2, 3])
    bigrams = np.array([(1 << 21) | 2] * 3 + [(5 << 21) | 5])
    amounts = np.array([0.5, nothing, nothing, nothing], np.float32)
    table.add(bigrams, np.array([9, 4, 3, 5]), amounts)
    assert _rows(table.frozen()) == {(1, 2): {9: 0.5, 3: 0.25}}
    table.add(bigrams[:1], np.array([7]), amounts[1:2])
    assert table.row(1, 2) == ([9, 3], [0.5, 0.25])


@given(
    several=st.lists(
        st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=8
    ),
    is_zero=st.booleans(),
    bound=st.sampled_from([2, 64]),
)
def test_rows_are_learnt_as_their_trigrams_are(
    several: list[tuple[int, int, int]], is_zero: bool, bound: int
) -> None:
    counter = TrigramCounter()
    counter.add(np.array([0, 1, 2, 0, 1, 3, 0, 2, 2], np.int64))
    one, other = (TrigramTable(bound, 4, 1.5, 0.9, counter.index(9, 3)) for _ in range(2))
    for count, each, seed in several:
        draw = np.random.default_rng(seed)
        bigrams = packed(draw.integers(0, 3, count), draw.integers(0, 3, count))
        successors = np.stack([draw.permutation(9)[:each] for _ in range(count)])
        amounts = draw.integers(0 if is_zero else 1, 4, (count, each)).astype(np.float32) / 4
        one.add(bigrams.repeat(each), successors.ravel(), amounts.ravel())
        other.add_rows(bigrams, successors, amounts)
    expected, got = one.frozen(), other.frozen()
    assert got.keys.tolist() == expected.keys.tolist()
    assert got.rows.ids.tolist() == expected.rows.ids.tolist()
    assert got.rows.weights.tolist() == expected.rows.weights.tolist()


def test_rows_of_nothing_teach_nothing() -> None:
    table = TrigramTable(8)
    nothing = np.empty((0, 3))
    table.add_rows(np.empty(0, np.int64), nothing.astype(np.int64), nothing.astype(np.float32))
    assert table.num_bigrams == 0


def test_what_was_known_heavier_than_the_maximum_becomes_as_heavy_as_that() -> None:
    counter = TrigramCounter()
    counter.add(np.array([1, 2, 3] * 3, np.int64))
    table = TrigramTable(8, max_weight=0.5, below=counter.index(10))
    assert table.row(1, 2) == ([3], [1.0])
    _add(table, [1, 2, 4])
    assert _rows(table.frozen())[1, 2] == {3: 0.5, 4: 0.25}
    assert table.row(1, 2) == ([4, 3], [0.25, 0.5])


def test_a_missing_successor_of_a_file_may_have_any_id() -> None:
    ids, weights = np.array([[3, 5]], np.int32), np.array([[0.5, 0.0]], np.float32)
    index = TrigramIndex(packed(np.array([1]), np.array([2])), Successors(ids, weights))
    table = TrigramTable(8, max_weight=3.0, below=index)
    _add(table, [1, 2, 5])
    assert _rows(table.frozen())[1, 2] == {5: 0.25, 3: 0.5}


def test_learning_goes_on_from_what_was_known_before_and_leaves_it_alone() -> None:
    counter = TrigramCounter()
    counter.add(np.array([1, 2, 3, 1, 2, 4, 9, 9, 9], np.int64))
    index = counter.index(100)
    before = _rows(index)
    table = TrigramTable(8, below=index)
    _add(table, [1, 2, 3])
    assert _rows(table.frozen()) == before | {(1, 2): {3: 0.75, 4: 0.5}}
    assert table.row(9, 9) == index.row(9, 9)
    assert _rows(index) == before
    table.clear()
    assert _rows(table.frozen()) == before


def test_an_index_of_fewer_or_more_successors_fits_below() -> None:
    counter = TrigramCounter()
    counter.add(np.array([1, 2, 3, 1, 2, 4, 1, 2, 3], np.int64))
    for width in (1, 5):
        table = TrigramTable(8, num_successors=2, below=counter.index(10, width))
        _add(table, [1, 2, 5])
        assert _rows(table.frozen())[1, 2] == pytest.approx({3: 2 / 3, 5: 0.25})


def _heaviest(row: tuple[list[int], list[float]], count: int) -> tuple[list[int], list[float]]:
    """Return the heaviest successors of a row that is too long, or any other row unchanged."""
    tokens, weights = row
    order = list(range(len(tokens)))
    if len(order) > count:
        order = sorted(order, key=lambda at: -weights[at])[:count]
    return [tokens[at] for at in order], [weights[at] for at in order]


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
    rows = Successors.none(len(lengths), width)
    for number, length in enumerate(lengths):
        rows.ids[number, :length] = draw.permutation(20)[:length]
        rows.weights[number, :length] = draw.integers(1, 4, length) / 4  # many weights are equal
    index = TrigramIndex(np.arange(len(lengths)), rows)  # bigrams (0, n)
    table = TrigramTable(64, num_successors=count, below=index)
    found = table.lookup(np.append(index.keys, 99))
    for number in range(len(lengths)):
        expected = _heaviest(index.row(0, number), count)
        assert table.row(0, number) == expected
        assert successors_at(found, number) == expected
    assert successors_at(found, -1) == ([], [])
    assert index.narrowed(width) is index
    assert found.ids.shape[1] == count


def test_an_index_is_cut_once_for_all_requests() -> None:
    counter = TrigramCounter()
    counter.add(np.array([1, 2, 3, 1, 2, 4], np.int64))
    settings = AdedSettings(successors=1, reset_per_request=True)
    drafter = AdedDrafter(settings, counter.index(10, 5))
    assert drafter.index is not None
    assert drafter.index.num_successors == 1
    sampling = Sampling(LogitsProcessorList(), do_sample=False)
    for proposer in drafter.new_session(sampling, capacity=8, batch=2).proposers:
        assert isinstance(proposer, TrigramProposer)
        assert proposer.table.below is drafter.index


def test_what_is_learnt_upon_what_was_learnt_can_be_bounded() -> None:
    index = None
    for start in range(0, 400, 100):
        table = TrigramTable(64, below=index)
        _add(table, list(range(start, start + 60)))
        index = table.frozen(max_bigrams=80)
        assert len(index.keys) <= 80
        assert index.row(start + 3, start + 4)[0] == [start + 5]


def test_nothing_is_known_at_first_and_short_texts_teach_nothing() -> None:
    table = TrigramTable(8)
    for stream in ([], [1], [1, 2]):
        _add(table, stream)
    assert table.num_bigrams == 0
    assert table.row(1, 2) == ([], [])
    assert TrigramIndex.empty().row(1, 2) == ([], [])
    assert not len(TrigramCounter().index(10).keys)


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
    assert table.row(1, 2)[1] == pytest.approx([0.25 * 60 * 8])
    assert all(len(row) <= 4 for row in _rows(table.frozen()).values())


def test_large_tokens_are_distinguished() -> None:
    top = (1 << 21) - 1
    table = TrigramTable(8)
    _add(table, [top, top, top, 0, top])
    known = {(top, top): {top: 0.25, 0: 0.25}, (top, 0): {top: 0.25}}
    assert _rows(table.frozen()) == known
    check_vocabulary(top + 1)
    with pytest.raises(ConfigError, match="vocabulary is too large"):
        check_vocabulary(top + 2)
    assert packed(np.array([1]), np.array([2])) < packed(np.array([2]), np.array([0]))


def _triples(stream: list[int]) -> Iterable[tuple[int, int, int]]:
    return zip(stream, stream[1:], stream[2:], strict=False)
