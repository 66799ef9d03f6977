"""Searches a table of trigrams for the continuations worth verifying (ADED, arXiv 2407.12021).

The search is a Monte Carlo tree search of some visits, each to the child that maximises
`Q + (c1 + ln((N + c2 + 1) / c2)) p sqrt(N) / (1 + n)`. That rule shares a node's visits out among
its children until all maximise it alike, which has a closed form (arXiv 2007.12509, section 3.2):
no chance, no visit that ends nowhere, and only nodes that will be candidates are looked up.
"""

from heapq import heappop, heappush
from math import log, sqrt
from typing import Final

import numpy as np
from pydantic import Field

from inference.draft_tree import ROOT
from inference.drafters.aded.index import Trigrams
from inference.drafters.candidates import Candidates
from jakiro.utils.settings import Settings

_NEWTON_STEPS: Final = 4  # shares are exact to about a percent


class SearchSettings(Settings):
    """How many visits a search makes, and how it explores."""

    visits: float = Field(150.0, gt=1, le=1e9)
    exploration: float = Field(32.0, gt=0, le=1e9)  # c1
    exploration_growth: float = Field(8.0, gt=0, le=1e9)  # c2: visits after which exploration grows


def search(
    trigrams: Trigrams,
    first: int,
    second: int,
    num_nodes: int,
    depth: int,
    settings: SearchSettings,
) -> Candidates:
    """Return the most visited continuations of two tokens, in the order of their visits.

    Args:
        trigrams: that weigh what follows.
        first: the last token but one.
        second: the last token.
        num_nodes: most candidates.
        depth: longest continuation.
        settings: of the search.
    """
    chosen: list[tuple[int, int, int, float]] = []  # token, parent, depth, score
    # Smallest first: (-visits, turn, parent, depth, token before, token).
    waiting: list[tuple[float, int, int, int, int, int]] = []
    order = 0
    node, level, visits = ROOT, 0, settings.visits
    while len(chosen) < num_nodes:
        if level < depth:
            tokens, weights = trigrams.row(first, second)
            for token, share in zip(tokens, share_visits(visits, weights, settings), strict=True):
                if share > 0:
                    heappush(waiting, (-share, order, node, level + 1, second, token))
                    order += 1
        if not waiting:
            break
        negative_visits, _, parent, level, first, second = heappop(waiting)
        visits = -negative_visits
        node = len(chosen)
        chosen.append((second, parent, level, visits / settings.visits))
    return _as_candidates(chosen)


def share_visits(visits: float, weights: list[float], settings: SearchSettings) -> list[float]:
    """Return the visits of a node's children: all of its own but the first.

    Child c gets `n_c = max(0, C w_c / (level - w_c) - 1)`, C being the factor of p / (1 + n) in the
    rule, with the level that makes the sum right. A child's value Q is the weight of its edge: what
    lies below counts alike.

    Args:
        visits: of the node.
        weights: of its children.
        settings: of the search.
    """
    total = visits - 1.0
    if total <= 0.0 or not weights:
        return [0.0] * len(weights)
    growth = settings.exploration_growth
    factor = (settings.exploration + log((visits + growth + 1.0) / growth)) * sqrt(visits)
    # The sum falls convexly in the level. Here the heaviest child alone would get all of it:
    # Newton's steps from below approach the solution without passing it.
    level = max(weights) * (1.0 + factor / (total + 1.0))
    for _ in range(_NEWTON_STEPS if len(weights) > 1 else 0):
        excess, slope = -total, 0.0
        for weight in weights:
            gap = level - weight
            ratio = factor * weight / gap
            if ratio > 1.0:
                excess += ratio - 1.0
                slope += ratio / gap
        if slope == 0.0:
            break
        level += excess / slope
    shares = [max(0.0, factor * weight / (level - weight) - 1.0) for weight in weights]
    found = sum(shares)
    # What a node a few ulps above one visit has to share out is lost in rounding.
    return [share * total / found for share in shares] if found > 0.0 else shares


def _as_candidates(chosen: list[tuple[int, int, int, float]]) -> Candidates:
    if not chosen:
        return Candidates.none()
    *integers, scores = zip(*chosen, strict=True)
    token_ids, parents, depths = np.array(integers, np.int64)
    return Candidates(token_ids, parents, depths, np.array(scores))
