"""Prompt lookup: the text after earlier matches of the last tokens, merged into one tree.

After prompt lookup decoding and suffix decoding (arXiv 2411.04975), but with the continuations of
several matches.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Int64
from pydantic import Field

from inference.draft_tree import ROOT
from inference.drafters.base import TokenDrafter
from inference.drafters.candidates import Candidates
from jakiro.utils.settings import Settings

_LEAST_SCORE: Final = 1e-30  # instead of 0 after rounding, because the logarithm must be finite


class LookupSettings(Settings):
    """The matches that count, and the part of their continuations that is drafted."""

    num_nodes: int = Field(16, ge=1)
    depth: int = Field(8, ge=1)
    shortest: int = Field(1, ge=1)  # tokens that must match
    longest: int = Field(8, ge=1)  # tokens beyond which all matches count alike
    matches: int = Field(32, ge=1)  # merged continuations: the longest matches, latest first
    growth: float = Field(2.0, ge=1)  # factor of the weight for each further matching token
    recency: float = Field(0.9, gt=0, le=1)  # factor of the weight for each later match
    discount: float = Field(0.8, gt=0, le=1)  # factor of the score for each further token


class LookupDrafter(TokenDrafter):
    """Drafts the text that followed earlier matches in prompt and output; stateless.

    Args:
        settings: settings of the matches.
    """

    def __init__(self, settings: LookupSettings | None = None) -> None:
        self.settings = settings or LookupSettings()
        super().__init__("lookup", self.settings.num_nodes, self.settings.depth)

    def draft(
        self, token_ids: Int64[np.ndarray, " tokens"], num_nodes: int, depth: int
    ) -> Candidates:
        """Return the merged continuations of the best matches.

        Args:
            token_ids: all tokens of the sequence.
            num_nodes: largest number of candidates.
            depth: largest number of tokens on a path.
        """
        own = self.settings
        found = find_matches(token_ids, own.longest)
        best = found.best(own.shortest, own.matches)
        order = np.arange(len(best.lengths))
        # Relative to the longest match, which comes first: its weight is 1, so no sum is 0.
        weights = own.growth ** (best.lengths - best.lengths[:1]) * own.recency**order
        paths = continuations(token_ids, best.ends, depth)
        return merged(paths.tolist(), weights.tolist(), own.discount).best(num_nodes)


class Matches(NamedTuple):
    """Earlier positions at which a text reads as at its end."""

    ends: Int64[np.ndarray, " matches"]  # positions of the last matching tokens, ascending
    lengths: Int64[np.ndarray, " matches"]  # numbers of matching tokens

    def best(self, shortest: int, count: int) -> "Matches":
        """Return the longest matches, the latest first among equals.

        Args:
            shortest: least number of matching tokens.
            count: largest number of matches.
        """
        latest_first = np.flatnonzero(self.lengths >= shortest)[::-1]
        order = np.argsort(-self.lengths[latest_first], kind="stable")[:count]
        return Matches(self.ends[latest_first[order]], self.lengths[latest_first[order]])


def find_matches(token_ids: Int64[np.ndarray, " tokens"], longest: int) -> Matches:
    """Return all earlier positions that match the end of a text.

    Args:
        token_ids: tokens of the text.
        longest: number of tokens after which the comparison stops.
    """
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
    """Return the tokens after each match, repeated where the text ends.

    A match that ends p tokens before the end of the text is continued with period p, so that
    repetitive text is drafted to any depth.

    Args:
        token_ids: tokens of the text.
        ends: positions of the last matching tokens.
        depth: number of tokens of each continuation.
    """
    period = len(token_ids) - 1 - ends
    steps = np.arange(depth) % period[:, None]
    return token_ids[ends[:, None] + 1 + steps]


def merged(paths: Sequence[Sequence[int]], weights: Sequence[float], discount: float) -> Candidates:
    """Return continuations as one tree, in which equal beginnings are one path.

    Args:
        paths: tokens of each continuation.
        weights: weight of each; the score of a candidate is the share of its continuations.
        discount: factor of the score for each further token.
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
