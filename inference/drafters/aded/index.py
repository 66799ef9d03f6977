"""Trigrams that stay as they are: counted from a corpus, or what an adaptive table has learnt."""

from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int32, Int64

from jakiro.errors import ConfigError

TOKEN_BITS: Final = 21
MAX_VOCABULARY: Final = 1 << TOKEN_BITS  # three tokens fit into 63 bits
NO_SUCCESSOR: Final = -1


class Successors(NamedTuple):
    """What follows some bigrams; missing ones have no weight and the id NO_SUCCESSOR."""

    ids: Int32[np.ndarray, "bigrams successors"]
    weights: Float32[np.ndarray, "bigrams successors"]

    @classmethod
    def none(cls, bigrams: int, successors: int) -> "Successors":
        """Return rows without any successor."""
        shape = (bigrams, successors)
        return cls(np.full(shape, NO_SUCCESSOR, np.int32), np.zeros(shape, np.float32))


@runtime_checkable
class Trigrams(Protocol):
    """Whatever knows the weights of the tokens that follow two others."""

    def row(self, first: int, second: int) -> tuple[list[int], list[float]]:
        """Return the tokens that follow two others, and their weights."""
        ...


class TrigramIndex:
    """Rows of successors in the order of their bigrams; nothing changes it, threads may share it.

    Args:
        keys: packed bigrams, ascending.
        rows: their successors.
    """

    def __init__(self, keys: Int64[np.ndarray, " bigrams"], rows: Successors) -> None:
        self.keys = keys
        self.rows = rows

    @classmethod
    def empty(cls, successors: int = 1) -> "TrigramIndex":
        """Return the index that knows nothing."""
        return cls(np.empty(0, np.int64), Successors.none(0, successors))

    @property
    def num_successors(self) -> int:
        """Places for successors of each bigram."""
        return int(self.rows.ids.shape[1])

    def lookup(self, bigrams: Int64[np.ndarray, " bigrams"]) -> Successors:
        """Return the successors of packed bigrams."""
        found = Successors.none(len(bigrams), self.num_successors)
        if not len(self.keys):
            return found
        places = np.searchsorted(self.keys, bigrams).clip(max=len(self.keys) - 1)
        is_known = self.keys[places] == bigrams
        found.ids[is_known] = self.rows.ids[places[is_known]]
        found.weights[is_known] = self.rows.weights[places[is_known]]
        return found

    def row(self, first: int, second: int) -> tuple[list[int], list[float]]:
        """Return the tokens that follow two others, and their weights."""
        key = (first << TOKEN_BITS) | second
        place = int(self.keys.searchsorted(key))
        if place == len(self.keys) or self.keys[place] != key:
            return [], []
        return successors_at(self.rows, place)

    def narrowed(self, num_successors: int) -> "TrigramIndex":
        """Return the index with the heaviest successors of each bigram, of equals the first ones.

        Rows that are short enough stay as they are; if all places are, so does the index. Whoever
        looks up often narrows once: the cost is that of one pass over the index, not of a sort at
        every lookup.

        Args:
            num_successors: the most that each bigram has.
        """
        if self.num_successors <= num_successors:
            return self
        rows = Successors(*(one[:, :num_successors].copy() for one in self.rows))
        is_long = self.rows.weights[:, num_successors] > 0  # missing ones stand at the end
        ids, weights = (one[is_long] for one in self.rows)
        order = np.argsort(-weights, axis=1, kind="stable")[:, :num_successors]
        rows.ids[is_long] = np.take_along_axis(ids, order, axis=1)
        rows.weights[is_long] = np.take_along_axis(weights, order, axis=1)
        return TrigramIndex(self.keys, rows)

    def within(self, vocab_size: int) -> "TrigramIndex":
        """Return the index without the tokens that a target does not have.

        Args:
            vocab_size: of the target.
        """
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
            Successors(*(np.take_along_axis(one, order, axis=1) for one in rows)),
        )

    def items(self) -> Iterator[tuple[tuple[int, int], dict[int, float]]]:
        """Yield every bigram with its successors' weights, heaviest first."""
        for key, ids, weights in zip(self.keys.tolist(), *self.rows, strict=True):
            order = [place for place in np.argsort(-weights, kind="stable") if weights[place] > 0]
            yield unpacked(key), {int(ids[place]): float(weights[place]) for place in order}


def successors_at(rows: Successors, place: int) -> tuple[list[int], list[float]]:
    """Return one row without its missing successors, which stand at its end."""
    weights = rows.weights[place].tolist()
    count = weights.index(0.0) if 0.0 in weights else len(weights)
    return rows.ids[place, :count].tolist(), weights[:count]


def packed(
    first: Int64[np.ndarray, " bigrams"], second: Int64[np.ndarray, " bigrams"]
) -> Int64[np.ndarray, " bigrams"]:
    """Return two tokens as one number, which orders as the pair does."""
    return (first << TOKEN_BITS) | second


def trigrams_of(
    token_ids: Int32[np.ndarray, " tokens"] | Int64[np.ndarray, " tokens"],
) -> tuple[Int64[np.ndarray, " trigrams"], Int64[np.ndarray, " trigrams"]]:
    """Return the packed bigrams of a text and the token after each."""
    ids = np.asarray(token_ids, np.int64)
    return packed(ids[:-2], ids[1:-1]), ids[2:]


def unpacked(key: int) -> tuple[int, int]:
    """Return the two tokens of a packed bigram."""
    return key >> TOKEN_BITS, key & (MAX_VOCABULARY - 1)


def check_vocabulary(vocab_size: int) -> None:
    """Refuse a vocabulary whose tokens do not fit.

    Raises:
        ConfigError: there are too many of them.
    """
    if vocab_size > MAX_VOCABULARY:
        raise ConfigError(
            "the vocabulary is too large for a table of trigrams",
            expected=f"at most {MAX_VOCABULARY} tokens",
            got=vocab_size,
        )
