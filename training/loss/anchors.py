"""Anchors: the last verified position for each position that is drafted in training.

In decoding with A autoregressive levels, position i is drafted at a distance d of 1 to A from its
anchor. An example with A = 2:

    index       0   1   2   3   4   5   6
    anchor      0   0   1   1   3   4   4
    distance    0   1   1   2   1   1   2      a distance of 0 carries no loss

The queries of a moa trunk do not interact, so each position of a sequence can have its own random
distance. If queries interact, either through the target's last layers or through features that are
fed back, the anchors of neighboring positions must be consistent with each other.

A drafter that goes on writing alone, for example because its server cannot be reached, drafts at
ever longer distances from its last verified token. Far anchors train this: from one position of a
document on, all positions have the same anchor.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Anchors = Literal["drafting", "blocks", "previous"]
Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

NEAR_SHARE = 0.85  # share of the positions whose distance occurs in decoding
LONGEST = 512  # longest distance of the other positions
_FAR = 7  # part of the seed that selects documents with far anchors


@dataclass(frozen=True)
class AnchorRule:
    """The rule by which the anchors of a packed sequence are selected.

    Attributes:
        num_levels: number A of autoregressive levels in the drafter's schedule.
        num_roots: for kind "roots", the largest number of positions of a sequence that are drafted;
            None for all that have a target.
        near_share: share of the sampled anchors whose distance occurs in decoding.
        far_share: share of the documents with far anchors, for each anchor sample.
    """

    kind: Literal["drafting", "blocks", "previous", "ttt", "roots"]
    num_levels: int
    num_samples: int = 1
    near_share: float = NEAR_SHARE
    far_share: float = 0.0
    num_roots: int | None = None

    def anchors(
        self, document_starts: Indices, seed: tuple[int, ...], is_response: Mask | None = None
    ) -> Indices:
        """Return anchors of shape [samples, length].

        Args:
            seed: seed of the random numbers, such as (seed, epoch, sequence), which must be the
                same on every process.
            is_response: whether each token belongs to a response, shape [length], by which far
                anchors are selected; None if this is unknown.
        """
        samples = range(self.num_samples)
        if self.kind == "roots":
            roots = root_anchors(document_starts, is_response, self.num_roots, (*seed, 0))
            return roots[None]
        sampled = [self._sample(document_starts, seed, sample) for sample in samples]
        if self.far_share:
            sampled = [
                with_far_anchors(
                    near, document_starts, is_response, self.far_share, (*seed, sample, _FAR)
                )
                for sample, near in enumerate(sampled)
            ]
        return np.stack(sampled)

    def _sample(self, starts: Indices, seed: tuple[int, ...], sample: int) -> Indices:
        match self.kind:
            case "drafting":
                return sample_anchors(starts, self.num_levels, (*seed, sample), self.near_share)
            case "blocks":
                return sample_blocks(starts, self.num_levels, (*seed, sample), self.near_share)
            case "previous":  # ordinary teacher forcing
                return ttt_anchors(starts, 1)
            case _:
                return ttt_anchors(starts, 1 + sample)


def sample_anchors(
    document_starts: Indices,
    num_levels: int,
    seed: tuple[int, ...],
    near_share: float = NEAR_SHARE,
) -> Indices:
    """Sample an anchor `max(document start, i - d)` for each index i of a sequence.

    The distance d is uniform on 1..num_levels for most positions (85% by default) and log-uniform
    up to 512 for the rest. The first token of a document is its own anchor (d = 0). Because this
    never occurs in decoding, the position carries no loss.
    """
    random = np.random.default_rng(np.random.SeedSequence(seed))
    count = len(document_starts)
    near = random.integers(1, num_levels, size=count, endpoint=True)
    far = np.exp(random.uniform(0.0, np.log(LONGEST), size=count)).round().astype(np.int64)
    distance = np.where(random.random(count) < near_share, near, far)
    return np.maximum(document_starts, np.arange(count) - distance)


def sample_blocks(
    document_starts: Indices,
    num_levels: int,
    seed: tuple[int, ...],
    near_share: float = NEAR_SHARE,
) -> Indices:
    """Divide each document into blocks whose positions share an anchor, and return the anchors.

    The anchor is the index before the block, so distances run from 1 to the length of the block.
    The first block of a document is anchored at the first token, which carries no loss.
    The block length of a document is num_levels for most documents (85% by default), and
    log-uniform between num_levels and 512 for the rest. A random offset shifts the blocks of each
    document.
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


def ttt_anchors(document_starts: Indices, distance: int) -> Indices:
    """For each index i, return the anchor i - distance, or i if that index is outside the document.

    A position that is its own anchor carries no loss.
    """
    index = np.arange(len(document_starts))
    anchors = index - distance
    return np.where(anchors >= document_starts, anchors, index)


def root_anchors(
    document_starts: Indices, is_response: Mask | None, count: int | None, seed: tuple[int, ...]
) -> Indices:
    """Return the anchor i - 1 for `count` random roots i of blocks, and i for all other indices.

    The next token of a root is a token of a response. A block trunk drafts at roots only.
    """
    index = np.arange(len(document_starts))
    is_next = np.ones(len(index) - 1, bool) if is_response is None else is_response[1:]
    has_target = np.append(is_next & (document_starts[1:] == document_starts[:-1]), False)
    possible = np.flatnonzero((index > document_starts) & has_target)
    if count is not None and len(possible) > count:
        random = np.random.default_rng(np.random.SeedSequence(seed))
        possible = random.choice(possible, count, replace=False)
    anchors = index.copy()
    anchors[possible] -= 1
    return anchors


def with_far_anchors(
    anchors: Indices,
    document_starts: Indices,
    is_response: Mask | None,
    share: float,
    seed: tuple[int, ...],
) -> Indices:
    """Return anchors in which some documents have a single anchor from one position on.

    For half of these documents, the anchor is the last token before the first response; otherwise,
    or if there is none, it is any token of the document but the last. All later positions get this
    anchor, and earlier positions keep theirs. An example with the anchor 2:

        index       0   1   2   3   4   5   6
        before      0   0   1   1   3   4   4
        after       0   0   1   2   2   2   2
    """
    random = np.random.default_rng(np.random.SeedSequence(seed))
    result = anchors.copy()
    firsts, counts = np.unique(document_starts, return_counts=True)
    for first, count in zip(firsts.tolist(), counts.tolist(), strict=True):
        is_far, is_at_response, fraction = random.random(3)
        if is_far >= share or count < 2:
            continue
        anchor = first + int(fraction * (count - 1))
        if is_response is not None and is_at_response < 0.5:
            responses = np.flatnonzero(is_response[first + 1 : first + count])
            anchor = first + int(responses[0]) if len(responses) else anchor
        result[anchor + 1 : first + count] = anchor
    return result
