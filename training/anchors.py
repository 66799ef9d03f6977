"""Anchors: where verification is taken to have ended when a position is drafted.

Decoding drafts position i at distance 1..A from the last verified position. The trunk's queries do
not interact, so every position of a row can draw a distance of its own.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt

Anchors = Literal["drafting", "previous"]

NEAR_SHARE = 0.85  # of positions whose distance is one that the decoding schedule uses
LONGEST = 512  # of the others, so that the drafter survives a long gap in verification


def draw_anchors(
    document_starts: npt.NDArray[np.int64], num_levels: int, seed: tuple[int, ...]
) -> npt.NDArray[np.int64]:
    """Draw for each row index i the index `max(document start, i - d)` of its anchor.

    d is uniform on 1..num_levels for 85% of the positions and log-uniform up to 512 for the rest.
    At a document's first token the anchor is the token itself (d = 0), which never occurs when
    decoding; no loss is taken there.

    Args:
        document_starts: row index of the first token of each position's document, shape [rows].
        num_levels: autoregressive levels A of the schedule.
        seed: key of the draw, such as (seed, epoch, row, draw); the same on every process.
    """
    random = np.random.default_rng(np.random.SeedSequence(seed))
    count = len(document_starts)
    near = random.integers(1, num_levels, size=count, endpoint=True)
    far = np.exp(random.uniform(0.0, np.log(LONGEST), size=count)).round().astype(np.int64)
    distance = np.where(random.random(count) < NEAR_SHARE, near, far)
    return np.maximum(document_starts, np.arange(count) - distance)


def previous_anchors(document_starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return for each row index i the anchor `max(document start, i - 1)`: plain teacher forcing.

    The drafter then never learns to draft further than one token from what is verified.
    """
    return np.maximum(document_starts, np.arange(len(document_starts)) - 1)
