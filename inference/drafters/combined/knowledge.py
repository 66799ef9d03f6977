"""What two drafters that share trees learn of each other, from what the target continued with."""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from threading import Lock

import numpy as np
from pydantic import Field

from inference.draft_tree import ROOT, TreeRow
from inference.drafters.candidates import Candidates
from inference.drafters.combined.pool import SECOND, Calibration, Pool
from inference.protocol import Budget
from inference.trees.shape import TreeShape
from jakiro.utils.settings import Settings

Place = tuple[int, int, int]  # depth, parent's turn among the expanded nodes, turn among siblings

DOUBT = 6.0  # rounds that a place is imagined to have won half of
MEMORY = 256.0  # rounds after which an observation weighs 1/e


class SampledNodes:
    """Running estimates for every place of a tree; those of a smaller one are among them.

    Places are as many as a tree has nodes, so that memory is bounded; threads may share them.
    """

    def __init__(self) -> None:
        self._counts: dict[Place, tuple[float, float]] = {}  # wins, rounds
        self._lock = Lock()

    def learn(self, row: TreeRow, path: Sequence[int]) -> None:
        """Take in which nodes of a drawn tree were accepted."""
        accepted = set(path)
        with self._lock:
            for node, place in enumerate(places_of(row)):
                wins, steps = self._counts.get(place, (0.0, 0.0))
                fade = 1.0 - 1.0 / MEMORY
                self._counts[place] = (wins * fade + (node in accepted), steps * fade + 1.0)

    def worth(self, shape: TreeShape) -> float:
        """Return how many tokens a drawn tree is expected to win."""
        with self._lock:
            counts = [self._counts.get(place, (0.0, 0.0)) for place in places_in(shape)]
        return sum((wins + DOUBT / 2) / (steps + DOUBT) for wins, steps in counts)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._counts.clear()


def sampled_budget(
    places: SampledNodes,
    shape: TreeShape,
    budget: Budget,
    gains: Sequence[Sequence[float]],
) -> int:
    """Return how many nodes shall be drawn of a budget; other candidates get the rest.

    It knows nothing of what will be drawn, so that the target's law is kept.

    Args:
        places: what was learnt of drawn trees.
        shape: of the largest one.
        budget: of the whole tree.
        gains: tokens that each other candidate is expected to win, per sequence, the best first.
    """
    shapes = _cuts(shape, budget)

    def worth(size: int) -> float:
        rest = budget.num_nodes - size
        return len(gains) * places.worth(shapes[size]) + sum(sum(one[:rest]) for one in gains)

    return max(sorted(shapes, reverse=True), key=worth, default=0)


@lru_cache(maxsize=256)
def _cuts(shape: TreeShape, budget: Budget) -> Mapping[int, TreeShape]:
    """Return all shapes of smaller drawn trees by their sizes."""
    cuts = (shape.within(Budget(count, budget.depth)) for count in range(1, budget.num_nodes + 1))
    return {one.max_nodes: one for one in cuts if one is not None}


def places_of(row: TreeRow) -> list[Place]:
    """Return the place of every node of a drawn tree."""
    parents: dict[int, dict[int, int]] = {}  # depth -> parent -> turn
    places = []
    for parent, depth, rank in zip(row.parent, row.depth, row.rank, strict=True):
        turns = parents.setdefault(depth, {})
        places.append((depth, turns.setdefault(parent, len(turns)), rank))
    return places


def places_in(shape: TreeShape) -> list[Place]:
    """Return all places of a drawn tree."""
    return [
        (depth, place // shape.children, place % shape.children)
        for depth, size in enumerate(shape.level_sizes, start=1)
        for place in range(size)
    ]


MATCH, GAIN = range(2)  # a guess is right; it is right and nothing that was drawn is


class CombinedSettings(Settings):
    """How two drafters share a tree, and how fast their reliability is learnt."""

    num_nodes: int | None = Field(None, ge=1)  # None: as many as the first drafter's trees have
    grafts: int = Field(3, ge=0)  # candidates of the first drafter that the second continues
    graft_nodes: int = Field(3, ge=1)  # of each of these continuations
    trust: float = Field(0.5, gt=0, le=1)  # in scores of the second drafter, to begin with
    doubt: float = Field(8.0, gt=0)  # trials that the beginning counts for
    memory: float = Field(256.0, ge=1)  # trials after which an observation weighs 1/e


class Knowledge:
    """What was learnt of two sources, of fixed size; threads may share it.

    Args:
        settings: how fast it is learnt.
    """

    def __init__(self, settings: CombinedSettings) -> None:
        trust, doubt, memory = settings.trust, settings.doubt, settings.memory
        self.candidates = Calibration((1.0, trust, 1.0), doubt, memory)  # by who has them
        # Of the second source, before anything is drawn: see MATCH and GAIN.
        self.guesses = Calibration((trust, trust / 2), doubt, memory)
        self.places = SampledNodes()

    def clear(self) -> None:
        """Forget everything."""
        for one in (self.candidates, self.guesses, self.places):
            one.clear()

    def learn(self, pool: Pool, emitted: Sequence[int]) -> None:
        """Take in the tokens that followed a root, and what they make of its candidates."""
        _learn(self.candidates, pool, pool.outcomes(emitted))

    def learn_sampled(
        self,
        row: TreeRow,
        pool: Pool,
        guess: Candidates,
        path: Sequence[int],
        emitted: Sequence[int],
    ) -> None:
        """Take in how drawn candidates and guesses shared the tokens that followed a root.

        Args:
            row: the first source's tree.
            pool: the candidates of both.
            guess: the second source's, below the root.
            path: drawn nodes that were accepted.
            emitted: the tokens.
        """
        self.places.learn(row, path)
        alone = Pool(_NOTHING, [])
        alone.graft(ROOT, guess, int(guess.depths.max(initial=0)))
        found = list(alone.outcomes(emitted))
        _learn(self.guesses, alone, found, MATCH)
        gains = []
        for node, is_right in found:
            at = ROOT
            for token in alone.path(node):
                at = pool.place_of[at, token]
            gains.append((node, is_right and pool.sources[at] == SECOND))
        _learn(self.guesses, alone, gains, GAIN)

    def gains(self, guess: Candidates) -> list[float]:
        """Return the tokens that guesses are expected to win beside drawn ones, likeliest first."""
        if not len(guess.token_ids):
            return []
        above = np.append(guess.scores, 1.0)[guess.parents]  # ROOT = -1 looks at the last one
        shares, zeros = guess.scores / above, np.zeros(len(guess.scores), np.int64)
        right = self.guesses.rates(zeros + MATCH, guess.depths, shares)
        wins = self.guesses.rates(zeros + GAIN, guess.depths, shares)
        reach = np.ones(len(shares) + 1)
        for node, parent in enumerate(guess.parents.tolist()):
            reach[node] = right[node] * reach[parent]
        gains = wins * reach[guess.parents]
        return gains[np.argsort(-reach[:-1], kind="stable")].tolist()


_NOTHING = TreeRow([], [], [], [], [], {}, {}, {})


def _learn(
    calibration: Calibration,
    pool: Pool,
    outcomes: Iterable[tuple[int, bool]],
    source: int | None = None,
) -> None:
    """Tell a calibration what became of candidates, as those of one source or of their own."""
    found = list(outcomes)
    if not found:
        return
    nodes = np.array([node for node, _ in found], np.int64)
    sources = np.array(pool.sources, np.int64)[nodes]
    if source is not None:
        sources = np.full(len(nodes), source, np.int64)
    depths = np.array(pool.depths, np.int64)[nodes]
    is_right = np.array([right for _, right in found], np.bool_)
    calibration.add(sources, depths, np.array(pool.scores)[nodes], is_right)
