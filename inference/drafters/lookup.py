"""Prompt lookup: what followed the longest suffixes of the text when they last occurred.

As prompt lookup decoding does and suffix decoding (arXiv 2411.04975) after it, but with the
continuations of several matches merged into one tree.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float, Int64
from pydantic import Field
from torch import Tensor

from inference.draft_tree import ROOT
from inference.drafters.base import TokenSession, WithoutMemory
from inference.drafters.candidates import Candidates
from inference.protocol import Budget
from inference.sampling import Sampling
from jakiro.utils.settings import Settings

_LEAST_SCORE: Final = 1e-30  # of what would be 0 by rounding: its logarithm must be finite


class LookupSettings(Settings):
    """What counts as a match, and how much of which continuation is drafted."""

    num_nodes: int = Field(16, ge=1)
    depth: int = Field(8, ge=1)
    shortest: int = Field(1, ge=1)  # tokens that must match
    longest: int = Field(8, ge=1)  # tokens beyond which matches count alike
    matches: int = Field(32, ge=1)  # continuations that are merged: the longest, the latest of them
    growth: float = Field(2.0, ge=1)  # by which one more matching token counts more
    recency: float = Field(0.9, gt=0, le=1)  # by which each match counts less than the one before
    discount: float = Field(0.8, gt=0, le=1)  # by which each further token counts less


class LookupDrafter(WithoutMemory):
    """Drafts what followed in prompt and output when they read like now; holds no state.

    Args:
        settings: of the matches.
    """

    def __init__(self, settings: LookupSettings | None = None) -> None:
        self.settings = settings or LookupSettings()
        self.version = "lookup"
        self.bytes_per_token = TokenSession.bytes_per_token
        self.max_nodes = self.settings.num_nodes
        self.max_depth = self.settings.depth

    def new_session(self, sampling: Sampling, capacity: int, batch: int = 1) -> TokenSession:
        """Return a session for `batch` sequences of up to `capacity` tokens."""
        guessers = [LookupGuesser(self.settings)] * batch
        return TokenSession(guessers, Budget(self.max_nodes, self.max_depth), capacity)


class LookupGuesser:
    """Guesses from the sequence alone.

    Args:
        settings: of the matches.
    """

    reads_logits = False

    def __init__(self, settings: LookupSettings) -> None:
        self.settings = settings

    def begin(self) -> bool:
        """Forget nothing: nothing is kept."""
        return False

    def read(self, token_ids: Int64[np.ndarray, " tokens"], num_known: int) -> None:
        """Keep nothing: the sequence itself is searched."""

    def guess(
        self, token_ids: Int64[np.ndarray, " tokens"], num_nodes: int, depth: int
    ) -> Candidates:
        """Return the merged continuations of the best matches."""
        own = self.settings
        found = find_matches(token_ids, own.longest)
        best = found.best(own.shortest, own.matches)
        order = np.arange(len(best.lengths))
        # Against the longest match found, which comes first: its weight is 1, whatever underflows.
        weights = own.growth ** (best.lengths - best.lengths[:1]) * own.recency**order
        rows = continuations(token_ids, best.ends, depth)
        return merged(rows.tolist(), weights.tolist(), own.discount).best(num_nodes)

    def read_logits(
        self, token_ids: Int64[np.ndarray, " tokens"], logits: Float[Tensor, "laws vocab"]
    ) -> None:
        """Never asked."""


class Matches(NamedTuple):
    """Earlier places where a text reads as at its end."""

    ends: Int64[np.ndarray, " matches"]  # where the last matching token stands, ascending
    lengths: Int64[np.ndarray, " matches"]  # matching tokens

    def best(self, shortest: int, count: int) -> "Matches":
        """Return the longest matches, the latest first among equals."""
        latest_first = np.flatnonzero(self.lengths >= shortest)[::-1]
        order = np.argsort(-self.lengths[latest_first], kind="stable")[:count]
        return Matches(self.ends[latest_first[order]], self.lengths[latest_first[order]])


def find_matches(token_ids: Int64[np.ndarray, " tokens"], longest: int) -> Matches:
    """Return all earlier places that match the end of a text, by up to `longest` tokens."""
    last = len(token_ids) - 1
    ends = np.flatnonzero(token_ids[:-1] == token_ids[last:])
    lengths = np.ones(len(ends), np.int64)
    alive = np.arange(len(ends))
    for back in range(1, longest):
        alive = alive[ends[alive] >= back]
        alive = alive[token_ids[ends[alive] - back] == token_ids[last - back]]
        if not len(alive):
            break
        lengths[alive] += 1
    return Matches(ends, lengths)


def continuations(
    token_ids: Int64[np.ndarray, " tokens"], ends: Int64[np.ndarray, " matches"], depth: int
) -> Int64[np.ndarray, "matches depth"]:
    """Return what followed each match; where the text ends, it goes on as it did from there.

    A match `p` tokens before the end continues with period p, so that text which repeats itself is
    drafted to any depth.
    """
    period = len(token_ids) - 1 - ends
    steps = np.arange(depth) % period[:, None]
    return token_ids[ends[:, None] + 1 + steps]


def merged(rows: Sequence[Sequence[int]], weights: Sequence[float], discount: float) -> Candidates:
    """Return continuations as one tree, in which equal beginnings are one path.

    Args:
        rows: the continuations.
        weights: of each; a candidate scores its continuations' share of all of them.
        discount: of the score of each further token.
    """
    place_of: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    depths: list[int] = []
    scores: list[float] = []
    total = sum(weights)
    for row, weight in zip(rows, weights, strict=True):
        node, share = ROOT, weight / total
        for depth, token in enumerate(row, start=1):
            node = place_of.setdefault((node, token), len(place_of))
            if node == len(scores):
                depths.append(depth)
                scores.append(0.0)
            scores[node] += share
            share *= discount
    if not place_of:
        return Candidates.none()
    parents, token_ids = np.array(list(place_of), np.int64).T
    return Candidates(
        token_ids, parents, np.array(depths), np.array(scores).clip(_LEAST_SCORE, 1.0)
    )
