"""How much a text repeats itself: an honest word on how easy it is to draft."""

from collections.abc import Iterable, Sequence


def repeated_ngram_share(texts: Iterable[Sequence[int]], *, size: int = 4) -> float:
    """Return the share, 0 to 1, of runs of tokens that occurred before in the same text.

    Args:
        texts: token ids of each text; those of its prompt do not belong to it.
        size: tokens in a run. Texts that hold no run do not count.
    """
    num_runs = num_repeated = 0
    for text in texts:
        runs = [tuple(text[i : i + size]) for i in range(len(text) - size + 1)]
        num_runs += len(runs)
        num_repeated += len(runs) - len(set(runs))
    return num_repeated / num_runs if num_runs else 0.0
