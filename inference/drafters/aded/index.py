"""An immutable index of trigrams, either counted in a corpus or copied from an adaptive table."""

from typing import Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int32, Int64

TOKEN_BITS: Final = 21  # number of bits of a token id in a packed bigram or trigram
MAX_VOCABULARY: Final = 1 << TOKEN_BITS  # three tokens fit into 63 bits
NO_SUCCESSOR: Final = -1


class Successors(NamedTuple):
    """Successors of bigrams; missing successors have weight 0 and the id NO_SUCCESSOR."""

    ids: Int32[np.ndarray, "bigrams successors"]
    weights: Float32[np.ndarray, "bigrams successors"]

    @classmethod
    def none(cls, bigrams: int, successors: int) -> "Successors":
        shape = (bigrams, successors)
        return cls(np.full(shape, NO_SUCCESSOR, np.int32), np.zeros(shape, np.float32))


@runtime_checkable
class Trigrams(Protocol):
    """A source of the tokens that follow each pair of tokens, with their weights."""

    def row(self, first: int, second: int) -> tuple[list[int], list[float]]:
        """Return the tokens that follow a pair of tokens, and the weights of these successors."""
        ...


class TrigramIndex:
    """An immutable table of successors, sorted by bigram; thread-safe."""

    def __init__(self, keys: Int64[np.ndarray, " bigrams"], rows: Successors) -> None:
        self.keys = keys
        self.rows = rows

    @classmethod
    def empty(cls, successors: int = 1) -> "TrigramIndex":
        return cls(np.empty(0, np.int64), Successors.none(0, successors))

    @property
    def num_successors(self) -> int:
        """The number of columns, which is the largest number of successors of a bigram."""
        return int(self.rows.ids.shape[1])

    def lookup(self, bigrams: Int64[np.ndarray, " bigrams"]) -> Successors:
        """Return the successors of packed bigrams."""
        found = Successors.none(len(bigrams), self.num_successors)
        if not len(self.keys):
            return found
        row = np.searchsorted(self.keys, bigrams).clip(max=len(self.keys) - 1)
        is_known = self.keys[row] == bigrams
        found.ids[is_known] = self.rows.ids[row[is_known]]
        found.weights[is_known] = self.rows.weights[row[is_known]]
        return found

    def row(self, first: int, second: int) -> tuple[list[int], list[float]]:
        key = (first << TOKEN_BITS) | second
        row = int(self.keys.searchsorted(key))
        if row == len(self.keys) or self.keys[row] != key:
            return [], []
        return successors_at(self.rows, row)

    def narrowed(self, num_successors: int) -> "TrigramIndex":
        """Return the index with only the heaviest successors of each bigram.

        Of successors with the same weight, the first ones are kept. Rows that are short enough do
        not change. Call this method once before many lookups, so that no lookup has to sort
        successors.
        """
        if self.num_successors <= num_successors:
            return self
        rows = Successors(*(column[:, :num_successors].copy() for column in self.rows))
        is_long = self.rows.weights[:, num_successors] > 0  # missing successors are at the end
        ids, weights = (column[is_long] for column in self.rows)
        order = np.argsort(-weights, axis=1, kind="stable")[:, :num_successors]
        rows.ids[is_long] = np.take_along_axis(ids, order, axis=1)
        rows.weights[is_long] = np.take_along_axis(weights, order, axis=1)
        return TrigramIndex(self.keys, rows)

    def within(self, vocab_size: int) -> "TrigramIndex":
        """Return the index without token ids of at least `vocab_size`, which the target lacks."""
        tokens = np.maximum(self.keys >> TOKEN_BITS, self.keys & (MAX_VOCABULARY - 1))
        is_successor = (self.rows.weights > 0) & (self.rows.ids < vocab_size)
        is_kept = (tokens < vocab_size) & is_successor.any(axis=1)
        if is_kept.all() and (is_successor == (self.rows.weights > 0)).all():
            return self
        order = np.argsort(~is_successor[is_kept], axis=1, kind="stable")
        rows = Successors(
            np.where(is_successor, self.rows.ids, NO_SUCCESSOR)[is_kept],
            np.where(is_successor, self.rows.weights, 0.0)[is_kept],
        )
        return TrigramIndex(
            self.keys[is_kept],
            Successors(*(np.take_along_axis(column, order, axis=1) for column in rows)),
        )


def successors_at(rows: Successors, row: int) -> tuple[list[int], list[float]]:
    """Return one bigram's successors and their weights, without missing successors.

    Args:
        rows: successors of several bigrams; missing successors must be at the end of each row.
    """
    weights = rows.weights[row].tolist()
    count = weights.index(0.0) if 0.0 in weights else len(weights)
    return rows.ids[row, :count].tolist(), weights[:count]


def packed(
    first: Int64[np.ndarray, " bigrams"], second: Int64[np.ndarray, " bigrams"]
) -> Int64[np.ndarray, " bigrams"]:
    """Return pairs of tokens as single integers that have the same order as the pairs."""
    return (first << TOKEN_BITS) | second


def trigrams_of(
    token_ids: Int32[np.ndarray, " tokens"] | Int64[np.ndarray, " tokens"],
) -> tuple[Int64[np.ndarray, " trigrams"], Int64[np.ndarray, " trigrams"]]:
    """Return the packed bigrams of a text, and the token after each bigram."""
    ids = np.asarray(token_ids, np.int64)
    return packed(ids[:-2], ids[1:-1]), ids[2:]
