"""How rows of successors grow by the trigrams that were met, all rows at once.

A successor of a row is one integer, whose order is that of the rule: those met now first, then the
heavier ones, then the smaller tokens. Sorting the integers sorts the rows.
"""

from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int32, Int64

from inference.drafters.trigram_index import (
    MAX_VOCABULARY,
    NO_SUCCESSOR,
    TOKEN_BITS,
    Successors,
)

# From the top: whether it was known only, how light it is (31 bits), its token.
_KNOWN: Final = 1 << (31 + TOKEN_BITS)
_LIGHTEST: Final = (1 << 31) - 1  # larger than the bits of any float32 above 0
_MISSING: Final = _KNOWN | _LIGHTEST << TOKEN_BITS  # a weight of 0, after all others


class Met(NamedTuple):
    """Different trigrams, and how much heavier each shall be."""

    bigrams: Int64[np.ndarray, " rows"]  # different ones, ascending
    row: Int64[np.ndarray, " trigrams"]  # which bigram is a trigram's own
    column: Int64[np.ndarray, " trigrams"]  # its place among those of one bigram
    successors: Int64[np.ndarray, " trigrams"]
    amounts: Float64[np.ndarray, " trigrams"]  # above 0

    @classmethod
    def of(
        cls,
        bigrams: Int64[np.ndarray, " given"],
        successors: Int64[np.ndarray, " given"],
        amounts: Float32[np.ndarray, " given"],
    ) -> "Met":
        """Return trigrams, of which there is one at least, with what each is given in all."""
        cells = bigrams << TOKEN_BITS | successors
        order = cells.argsort(kind="stable")
        cells = cells[order]
        is_first = _is_first(cells)
        totals = np.bincount(is_first.cumsum() - 1, amounts[order])
        cells = cells[is_first]
        bigrams = cells >> TOKEN_BITS
        is_first = _is_first(bigrams)
        row, starts = is_first.cumsum() - 1, is_first.nonzero()[0]
        column = np.arange(len(row)) - starts[row]
        return cls(bigrams[starts], row, column, cells & (MAX_VOCABULARY - 1), totals)

    @classmethod
    def of_rows(
        cls,
        bigrams: Int64[np.ndarray, " rows"],
        successors: Int64[np.ndarray, "rows each"],
        amounts: Float32[np.ndarray, "rows each"],
    ) -> "Met":
        """Return the same where neither bigrams nor any one's successors repeat themselves."""
        order = bigrams.argsort()
        row, column = np.divmod(np.arange(amounts.size), amounts.shape[1])
        totals = amounts[order].ravel().astype(np.float64)
        return cls(bigrams[order], row, column, successors[order].ravel(), totals)


def grown(before: Successors, met: Met, max_weight: float, decay: float) -> Successors:
    """Return rows in which what was met is heavier; of too many, those met now stay first.

    Args:
        before: the rows of the bigrams that were met.
        met: the trigrams.
        max_weight: at which a weight stops growing.
        decay: what is left of what was known.
    """
    count = before.ids.shape[1]
    known = np.minimum(before.weights * np.float32(decay), np.float32(max_weight))
    is_same = before.ids[met.row] == met.successors[:, None]
    again, at = np.divmod(is_same.ravel().nonzero()[0], count)  # much quicker than in two axes
    was_known = met.row[again], at
    weights = met.amounts.copy()
    weights[again] += known[was_known]
    weights = np.minimum(weights, max_weight).astype(np.float32)
    row, column, met_keys = met.row, met.column, _keys(weights, met.successors)
    if column.max() >= count:  # one bigram of a list may have thousands
        row, column, met_keys = _first_of_each(row, met_keys, count)
    keys = np.full((len(before.ids), count + int(column.max()) + 1), _MISSING)
    keys[:, :count] = _keys(known, before.ids) | _KNOWN
    keys[was_known] = _MISSING
    keys[row, count + column] = met_keys
    keys.sort(axis=1)
    return _rows(keys[:, :count])


def _first_of_each(
    row: Int64[np.ndarray, " n"], keys: Int64[np.ndarray, " n"], count: int
) -> tuple[Int64[np.ndarray, " m"], Int64[np.ndarray, " m"], Int64[np.ndarray, " m"]]:
    """Return row, place and key of the smallest keys of each row, at most `count` of each."""
    order = np.lexsort((keys, row))
    row, keys = row[order], keys[order]
    place = np.arange(len(row)) - np.searchsorted(row, row)
    stays = place < count
    return row[stays], place[stays], keys[stays]


def _keys(
    weights: Float32[np.ndarray, "*shape"],
    tokens: Int32[np.ndarray, "*shape"] | Int64[np.ndarray, "*shape"],
) -> Int64[np.ndarray, "*shape"]:
    # The bits of floats are in the order of the floats, as there are none below 0.
    lightness = _LIGHTEST - weights.view(np.int32)
    return lightness.astype(np.int64) << TOKEN_BITS | tokens & (MAX_VOCABULARY - 1)


def _rows(keys: Int64[np.ndarray, "rows successors"]) -> Successors:
    weights = (_LIGHTEST - (keys >> TOKEN_BITS & _LIGHTEST)).astype(np.int32).view(np.float32)
    ids = (keys & (MAX_VOCABULARY - 1)).astype(np.int32)
    ids[weights == 0] = NO_SUCCESSOR
    return Successors(ids, weights)


def _is_first(values: Int64[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
    """Return where ascending values differ from the one before."""
    is_first = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=is_first[1:])
    return is_first
