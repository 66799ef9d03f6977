"""How often the places of drawn trees win a token; decides how much is drawn, before it is."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from threading import Lock

from inference.draft_tree import TreeRow
from inference.protocol import Budget
from inference.tree_shape import TreeShape

Place = tuple[int, int, int]  # depth, parent's turn among the expanded nodes, turn among siblings

DOUBT = 6.0  # rounds that a place is imagined to have won half of
MEMORY = 256.0  # rounds after which an observation weighs 1/e


class DrawnPlaces:
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
                wins, rounds = self._counts.get(place, (0.0, 0.0))
                fade = 1.0 - 1.0 / MEMORY
                self._counts[place] = (wins * fade + (node in accepted), rounds * fade + 1.0)

    def worth(self, shape: TreeShape) -> float:
        """Return how many tokens a drawn tree is expected to win."""
        with self._lock:
            counts = [self._counts.get(place, (0.0, 0.0)) for place in places_in(shape)]
        return sum((wins + DOUBT / 2) / (rounds + DOUBT) for wins, rounds in counts)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._counts.clear()


def drawn_budget(
    places: DrawnPlaces,
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
