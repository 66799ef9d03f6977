"""A training-free drafter with a trigram table that adapts to the text (ADED, arXiv 2407.12021).

The paper's Monte Carlo tree search visits the child that maximizes
`Q + (c1 + ln((N + c2 + 1) / c2)) p sqrt(N) / (1 + n)`. Here Q, p and n are the value, the prior
probability and the number of visits of the child, and N is the number of visits of its parent. In
the limit of many visits, there is a closed form for each child's share of the visits (arXiv
2007.12509, section 3.2). This search computes the shares directly, so that it needs no random
numbers and looks up only nodes that become candidates.
"""

from heapq import heappop, heappush
from math import log, sqrt
from typing import Final

import numpy as np
from jaxtyping import Int64
from pydantic import Field

from inference.draft_tree import ROOT
from inference.drafters.aded.table import TrigramIndex, TrigramTable
from inference.drafters.base import TokenDrafter, TokenProposer
from inference.drafters.candidates import Candidates
from inference.protocol import AdaptiveDrafter
from inference.trees import MOST_CANDIDATES
from jakiro.utils.settings import Settings

VISITS: Final = 150.0  # total number of visits in one search
EXPLORATION: Final = 32.0  # c1
EXPLORATION_GROWTH: Final = 8.0  # c2: visits before exploration grows
_NEWTON_STEPS: Final = 4  # enough for shares with errors of about one percent


class AdedSettings(Settings):
    """Settings for learning trigrams, and for the size of the draft trees."""

    # Largest number of candidates in a tree.
    num_nodes: int = Field(24, ge=1, le=MOST_CANDIDATES)
    depth: int = Field(8, ge=1, le=MOST_CANDIDATES)  # largest number of tokens on a path
    # Largest number of learned bigrams; each takes about 500 bytes, more with many successors.
    max_bigrams: int = Field(2**17, ge=1, le=2**28)
    successors: int = Field(12, ge=1, le=256)  # largest number of successors of each bigram
    # Weight that a trigram gains at each occurrence, 0.04 in the paper; 0 to learn nothing from
    # texts.
    step: float = Field(0.1, ge=0, le=1e6)
    max_weight: float = Field(3.0, gt=0, le=1e6)  # largest weight of a trigram
    # Number of most recent tokens whose trigrams are learned again at every decoding step.
    window: int = Field(16, ge=3)


class AdedDrafter(TokenDrafter, AdaptiveDrafter):
    """Drafter that searches a table of trigrams, which decoding updates; thread-safe.

    Example:
        decoder = SpeculativeDecoder(target, AdedDrafter(AdedSettings(num_nodes=16)), tokenizer)
        output = decoder.generate("def main(", max_new_tokens=16, temperature=0)
    """

    def __init__(
        self, settings: AdedSettings | None = None, index: TrigramIndex | None = None
    ) -> None:
        settings = self.settings = settings or AdedSettings()
        super().__init__("aded", settings.num_nodes, settings.depth)
        self.proposer_names = ("trigrams",)
        self.index = index
        self.table = TrigramTable(
            settings.max_bigrams, settings.successors, settings.max_weight, below=index
        )

    def new_proposer(self) -> "TrigramProposer":
        return TrigramProposer(self.table, self.settings)

    def reset(self) -> None:
        """Discard what was learned from requests, but not what was known from the beginning."""
        self.table.clear()
        super().reset()


class TrigramProposer(TokenProposer):
    def __init__(self, table: TrigramTable, settings: AdedSettings) -> None:
        self.table = table
        self.settings = settings

    def read(self, token_ids: Int64[np.ndarray, " tokens"], num_known: int) -> None:
        """Learn the trigrams that end with a new token, and those of the last `window` tokens."""
        if self.settings.step and num_known < len(token_ids):
            begin = min(num_known - 2, len(token_ids) - self.settings.window)
            self.table.add(token_ids[max(0, begin) :], self.settings.step)

    def draft(
        self, token_ids: Int64[np.ndarray, " tokens"], num_nodes: int, depth: int
    ) -> Candidates:
        if len(token_ids) < 2:
            return Candidates.none()
        first, second = token_ids[-2:].tolist()
        return search(self.table, first, second, num_nodes, depth)


def search(table: TrigramTable, first: int, second: int, num_nodes: int, depth: int) -> Candidates:
    """Return the most visited continuations of two tokens, in the order of their visits."""
    nodes: list[tuple[int, int, int, float]] = []  # token, parent, depth, score
    # A heap with the smallest entry first: (-visits, order, parent, depth, previous token, token).
    waiting: list[tuple[float, int, int, int, int, int]] = []
    order = 0
    node, level, visits = ROOT, 0, VISITS
    while len(nodes) < num_nodes:
        if level < depth:
            row = table.row(first, second)
            shares = share_visits(visits, [*row.values()])
            for token, share in zip(row, shares, strict=True):
                if share > 0:
                    heappush(waiting, (-share, order, node, level + 1, second, token))
                    order += 1
        if not waiting:
            break
        negative_visits, _, parent, level, first, second = heappop(waiting)
        visits = -negative_visits
        node = len(nodes)
        nodes.append((second, parent, level, visits / VISITS))
    return Candidates.of(nodes)


def share_visits(visits: float, weights: list[float]) -> list[float]:
    """Return the visits of a node's children, which add up to the visits of the node minus 1.

    Child c gets `n_c = max(0, C w_c / (level - w_c) - 1)` visits, where w_c is its weight and C is
    the factor of p / (1 + n) in the formula at the top of this module. The condition that the
    visits have the right sum determines `level`. Both p and Q of a child equal its weight, and
    deeper nodes do not change Q.
    """
    total = visits - 1.0
    if total <= 0.0 or not weights:
        return [0.0] * len(weights)
    growth = log((visits + EXPLORATION_GROWTH + 1.0) / EXPLORATION_GROWTH)
    factor = (EXPLORATION + growth) * sqrt(visits)
    # The sum of the visits is a falling, convex function of `level`. At the initial level, the
    # heaviest child alone gets all visits, so this level is not above the solution, and Newton's
    # method approaches the solution from below without passing it.
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
    sum_of_shares = sum(shares)
    # If a node has barely more than one visit, rounding may leave no visits for its children.
    return [share * total / sum_of_shares for share in shares] if sum_of_shares > 0.0 else shares
