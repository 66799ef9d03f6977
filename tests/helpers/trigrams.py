"""The content of tables and indices of trigrams, as dictionaries."""

from inference.drafters.aded.table import TOKEN_BITS, TrigramIndex, TrigramTable


def known_trigrams(
    source: TrigramTable | TrigramIndex,
) -> dict[tuple[int, int], dict[int, float]]:
    """Return the weights of the successors of every bigram."""
    index = source if isinstance(source, TrigramIndex) else source.below
    keys = [] if index is None else index.keys.tolist()
    pairs = {(key >> TOKEN_BITS, key & ((1 << TOKEN_BITS) - 1)) for key in keys}
    learned = set() if isinstance(source, TrigramIndex) else set(source._rows)
    return {pair: source.row(*pair) for pair in pairs | learned}
