"""Draft trees in which every node is expanded, with as many children as its depth says."""

from functools import lru_cache
from itertools import accumulate
from math import prod
from operator import mul

from pydantic import Field, PositiveInt

from inference.protocol import Budget
from jakiro.settings import Settings


class KaryShape(Settings):
    """How a k-ary tree grows (arXiv 2401.06706)."""

    children: tuple[PositiveInt, ...] = Field((4, 2, 2), min_length=1)  # of nodes, by depth
    num_nodes: int = Field(28, ge=1)  # deterministic trees keep the best N of all candidates
    sampled: bool = False

    @property
    def depth(self) -> int:
        """Longest path of the tree."""
        return len(self.children)

    @property
    def level_sizes(self) -> list[int]:
        """Candidates at each depth, before the best are chosen."""
        return list(accumulate(self.children, mul))

    @property
    def max_nodes(self) -> int:
        """Nodes that verification must have room for."""
        everything = sum(self.level_sizes)
        return everything if self.sampled else min(self.num_nodes, everything)

    def children_at(self, depth: int) -> int:
        """Return how many candidates of this depth each expanded node gets."""
        return self.children[depth - 1]

    def breadth_at(self, depth: int) -> int:
        """Return how many candidates of this depth are expanded: all of them."""
        return prod(self.children[:depth])

    def within(self, budget: Budget) -> "KaryShape | None":
        """Return the shape cut to a budget; None where no tree fits.

        A deterministic tree gives up its worst candidates; a sampled one, of which none may be
        taken back, draws fewer: the deepest levels become narrow first, then short.
        """
        return _cut(self, budget)


@lru_cache(maxsize=1024)
def _cut(shape: KaryShape, budget: Budget) -> KaryShape | None:
    depth = shape.depth if budget.depth is None else min(budget.depth, shape.depth)
    if min(depth, budget.num_nodes) < 1:
        return None
    num_nodes = min(budget.num_nodes, shape.num_nodes)
    fields = {"children": shape.children[:depth], "num_nodes": num_nodes}
    cut = shape.model_copy(update=fields)
    while cut.max_nodes > budget.num_nodes:
        cut = cut.model_copy(update={"children": _narrower(cut.children)})
    return cut


def _narrower(children: tuple[int, ...]) -> tuple[int, ...]:
    """Return the next smaller tree: one child fewer at the deepest branching, or a level less."""
    branching = [level for level, count in enumerate(children) if count > 1]
    if not branching:
        return children[:-1]
    last = branching[-1]
    return (*children[:last], children[last] - 1, *children[last + 1 :])
