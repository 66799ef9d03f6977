"""The content of tables and indices of trigrams, as dictionaries."""

import numpy as np

from inference.drafters.aded.index import TOKEN_BITS, TrigramIndex
from inference.drafters.aded.table import TrigramTable


def known_trigrams(
    source: TrigramTable | TrigramIndex,
) -> dict[tuple[int, int], dict[int, float]]:
    """Return the weights of the successors of every bigram."""
    if isinstance(source, TrigramIndex):
        keys = source.keys
    else:
        keys = source._slots._keys[source._slots._keys > 0] - 1
        if source.below is not None:
            keys = np.union1d(keys, source.below.keys)
    pairs = [(key >> TOKEN_BITS, key & ((1 << TOKEN_BITS) - 1)) for key in keys.tolist()]
    return {pair: dict(zip(*source.row(*pair), strict=True)) for pair in pairs}
