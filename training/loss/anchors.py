"""Anchors: where verification is taken to have ended when a position is drafted.

Decoding drafts position i at distance 1..A from the last verified position. Queries of a moa trunk
do not interact, so every position of a row can draw a distance of its own. Where they do interact,
through the target's last layers or through features that are fed back, positions share anchors.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Anchors = Literal["drafting", "blocks", "previous"]
Indices = npt.NDArray[np.int64]

NEAR_SHARE = 0.85  # of positions whose distance is one that the decoding schedule uses
LONGEST = 512  # of the others, so that the drafter survives a long gap in verification


@dataclass(frozen=True)
class AnchorRule:
    """How the anchors of a row are chosen.

    Attributes:
        kind: "drafting" draws each position's own, "blocks" one for several positions in a row,
            "previous" takes the position before, and "rollout" makes distance 1, 2, ... one draw.
        num_levels: autoregressive levels A of the schedule.
        draws: how many anchors each position gets.
        near_share: of the anchors that are drawn, those at a distance that decoding has.
    """

    kind: Literal["drafting", "blocks", "previous", "rollout"]
    num_levels: int
    draws: int = 1
    near_share: float = NEAR_SHARE

    def anchors(self, document_starts: Indices, seed: tuple[int, ...]) -> Indices:
        """Return anchors of shape [draws, rows].

        Args:
            document_starts: row index of the first token of each position's document, [rows].
            seed: key of chance, such as (seed, epoch, row); the same on every process.
        """
        return np.stack([self._draw(document_starts, seed, draw) for draw in range(self.draws)])

    def _draw(self, starts: Indices, seed: tuple[int, ...], draw: int) -> Indices:
        match self.kind:
            case "drafting":
                return draw_anchors(starts, self.num_levels, (*seed, draw), self.near_share)
            case "blocks":
                return draw_blocks(starts, self.num_levels, (*seed, draw), self.near_share)
            case "previous":
                return previous_anchors(starts)
            case "rollout":
                return rollout_anchors(starts, 1 + draw)


def draw_anchors(
    document_starts: Indices,
    num_levels: int,
    seed: tuple[int, ...],
    near_share: float = NEAR_SHARE,
) -> Indices:
    """Draw for each row index i the index `max(document start, i - d)` of its anchor.

    d is uniform on 1..num_levels for most positions (85%) and log-uniform up to 512 for the rest.
    At a document's first token the anchor is the token itself (d = 0), which never occurs when
    decoding; no loss is taken there.

    Args:
        document_starts: row index of the first token of each position's document, shape [rows].
        num_levels: autoregressive levels A of the schedule.
        seed: key of the draw, such as (seed, epoch, row, draw); the same on every process.
        near_share: of the positions, those of the first kind.
    """
    random = np.random.default_rng(np.random.SeedSequence(seed))
    count = len(document_starts)
    near = random.integers(1, num_levels, size=count, endpoint=True)
    far = np.exp(random.uniform(0.0, np.log(LONGEST), size=count)).round().astype(np.int64)
    distance = np.where(random.random(count) < near_share, near, far)
    return np.maximum(document_starts, np.arange(count) - distance)


def draw_blocks(
    document_starts: Indices,
    num_levels: int,
    seed: tuple[int, ...],
    near_share: float = NEAR_SHARE,
) -> Indices:
    """Draw for each document a period and a phase; positions of one period share their anchor.

    The anchor is the index before the period, so distances run from 1 to the period: to num_levels
    for most documents (85%), log-uniform from there up to 512 for the rest.

    Args:
        document_starts: row index of the first token of each position's document, shape [rows].
        num_levels: autoregressive levels A of the schedule.
        seed: key of the draw, as for `draw_anchors`.
        near_share: of the documents, those of the first kind.
    """
    random = np.random.default_rng(np.random.SeedSequence(seed))
    firsts, document = np.unique(document_starts, return_inverse=True)
    count = len(firsts)
    far = np.exp(random.uniform(np.log(num_levels), np.log(LONGEST), size=count)).round()
    period = np.where(random.random(count) < near_share, num_levels, far).astype(np.int64)
    phase = random.integers(0, period)
    offset = np.arange(len(document_starts)) - document_starts + phase[document]
    begin = np.arange(len(document_starts)) - offset % period[document]
    return np.maximum(document_starts, begin - 1)


def previous_anchors(document_starts: Indices) -> Indices:
    """Return for each row index i the anchor `max(document start, i - 1)`: plain teacher forcing.

    The drafter then never learns to draft further than one token from what is verified.
    """
    return np.maximum(document_starts, np.arange(len(document_starts)) - 1)


def rollout_anchors(document_starts: Indices, distance: int) -> Indices:
    """Return for each row index i the anchor i - distance, or i itself where that is not there.

    No loss is taken where the anchor is the token itself.
    """
    index = np.arange(len(document_starts))
    anchors = index - distance
    return np.where(anchors >= document_starts, anchors, index)
