"""Prompt lookup: trees of the text that followed earlier occurrences of the last tokens.

The method follows prompt lookup decoding and suffix decoding (arXiv 2411.04975), but merges the
continuations of several matches into one tree.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Int64
from pydantic import Field

from inference.draft_tree import ROOT
from inference.drafters.base import TokenDrafter
from inference.drafters.candidates import Candidates
from inference.trees import MOST_CANDIDATES
from jakiro.utils.settings import Settings

GROWTH: Final = 2.0  # factor of a match's weight for each additional equal token
# Factor of a match's weight for each other match that is longer, or as long and later.
RECENCY: Final = 0.9
DISCOUNT: Final = 0.8  # factor of a candidate's score for each drafted token before it on its path
_LEAST_SCORE: Final = 1e-30  # replaces scores that were rounded to 0, which has no logarithm


class LookupSettings(Settings):
    """Settings for finding matches, and for the size of the draft trees.

    A match is an earlier position in the text whose tokens equal the last tokens of the text.
    """

    # largest number of candidates in a tree
    num_nodes: int = Field(16, ge=1, le=MOST_CANDIDATES)
    depth: int = Field(8, ge=1, le=MOST_CANDIDATES)  # largest number of tokens on a path
    shortest: int = Field(1, ge=1)  # smallest number of equal tokens in a match
    longest: int = Field(8, ge=1)  # longer matches are treated as matches of this length
    # largest number of matches to merge; the longest are preferred, then the latest
    matches: int = Field(32, ge=1, le=MOST_CANDIDATES)


class LookupDrafter(TokenDrafter):
    """Drafter of the text that followed earlier occurrences of the last tokens; stateless.

    Example:
        drafter = LookupDrafter(LookupSettings(num_nodes=24))
        output = SpeculativeDecoder(target, drafter, tokenizer).generate("a b a", max_new_tokens=16)
    """

    def __init__(self, settings: LookupSettings | None = None) -> None:
        self.settings = settings or LookupSettings()
        super().__init__("lookup", self.settings.num_nodes, self.settings.depth)
        self.proposer_names = ("lookup",)

    def draft(
        self, token_ids: Int64[np.ndarray, " tokens"], num_nodes: int, depth: int
    ) -> Candidates:
        settings = self.settings
        matches = find_matches(token_ids, settings.longest)
        best = matches.best(settings.shortest, settings.matches)
        order = np.arange(len(best.lengths))
        # The longest match, which comes first, has weight 1, so the sum of the weights cannot be 0.
        weights = GROWTH ** (best.lengths - best.lengths[:1]) * RECENCY**order
        paths = continuations(token_ids, best.ends, depth)
        tree = merged(paths.tolist(), weights.tolist(), DISCOUNT).best(num_nodes)
        return tree._replace(strength=int(best.lengths.max(initial=0)))


class Matches(NamedTuple):
    ends: Int64[np.ndarray, " matches"]  # position of each match's last token
    lengths: Int64[np.ndarray, " matches"]  # number of matching tokens of each match

    def best(self, shortest: int, count: int) -> "Matches":
        """Return the longest matches; among matches of the same length, the latest come first."""
        latest_first = np.flatnonzero(self.lengths >= shortest)[::-1]
        order = np.argsort(-self.lengths[latest_first], kind="stable")[:count]
        return Matches(self.ends[latest_first[order]], self.lengths[latest_first[order]])


def find_matches(token_ids: Int64[np.ndarray, " tokens"], longest: int) -> Matches:
    """Return all earlier positions in a text that match its end, in the order of the text."""
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
    """Return the tokens after each match, repeated when the end of the text is reached.

    If only p tokens follow a match, these p tokens are repeated, so that repetitive text can be
    drafted to any depth.
    """
    period = len(token_ids) - 1 - ends
    steps = np.arange(depth) % period[:, None]
    return token_ids[ends[:, None] + 1 + steps]


def merged(paths: Sequence[Sequence[int]], weights: Sequence[float], discount: float) -> Candidates:
    """Return one tree of several continuations, in which common beginnings share one path.

    Args:
        weights: weight of each continuation. The score of a candidate is the total weight of the
            continuations that contain the candidate, as a share of the sum of all weights.
        discount: factor of a candidate's score for each token before it on its path.
    """
    node_of: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    depths: list[int] = []
    scores: list[float] = []
    total = sum(weights)
    for path, weight in zip(paths, weights, strict=True):
        node, share = ROOT, weight / total
        for depth, token in enumerate(path, start=1):
            node = node_of.setdefault((node, token), len(node_of))
            if node == len(scores):
                depths.append(depth)
                scores.append(0.0)
            scores[node] += share
            share *= discount
    if not node_of:
        return Candidates.none()
    parents, token_ids = np.array(list(node_of), np.int64).T
    return Candidates(
        token_ids, parents, np.array(depths), np.array(scores).clip(_LEAST_SCORE, 1.0)
    )
