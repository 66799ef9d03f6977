"""How large draft trees grow, and how they are cut to a budget."""

from functools import lru_cache

from pydantic import Field

from inference.protocol import Budget
from inference.sampling import Sampling
from jakiro.utils.settings import Settings

MAX_PASSES = 16  # most drafter passes for one tree


class TreeShape(Settings):
    """How a draft tree grows."""

    autoregressive_levels: int = Field(2, ge=1, le=MAX_PASSES)  # drafter passes A
    parallel_levels: int = Field(1, ge=0)  # further levels P, read off the last pass
    children: int = Field(3, ge=1)  # candidates under each expanded node
    breadth: int = Field(2, ge=1)  # nodes expanded per level
    num_nodes: int = Field(8, ge=1)  # deterministic trees keep the best N of all candidates
    sampled: bool = False

    @property
    def depth(self) -> int:
        """Longest path of the tree."""
        return self.autoregressive_levels + self.parallel_levels

    @property
    def level_sizes(self) -> list[int]:
        """Candidates at each depth, before the best are chosen."""
        sizes = [self.children]
        for _ in range(self.depth - 1):
            sizes.append(self.children * min(self.breadth, sizes[-1]))
        return sizes

    @property
    def max_nodes(self) -> int:
        """Nodes that verification must have room for."""
        everything = sum(self.level_sizes)
        return everything if self.sampled else min(self.num_nodes, everything)

    def within(self, budget: Budget) -> "TreeShape | None":
        """Return the shape cut to a budget; None where no tree fits.

        Depth goes first by passes, then by parallel levels. A deterministic tree gives up its worst
        candidates; a sampled one, of which none may be taken back, draws fewer.
        """
        return _cut(self, budget)


@lru_cache(maxsize=1024)
def _cut(shape: TreeShape, budget: Budget) -> TreeShape | None:
    depth = shape.depth if budget.depth is None else min(budget.depth, shape.depth)
    if min(depth, budget.num_nodes) < 1:
        return None
    passes = max(1, depth - shape.parallel_levels)
    levels = {"autoregressive_levels": passes, "parallel_levels": depth - passes}
    num_nodes = min(budget.num_nodes, shape.num_nodes)
    cut = shape.model_copy(update={**levels, "num_nodes": num_nodes})
    return _narrowed(cut, budget.num_nodes) if shape.sampled else cut


def _narrowed(shape: TreeShape, num_nodes: int) -> TreeShape | None:
    """Return the widest shape of this depth whose draws fit; None where not even a chain.

    Wide means many children under many nodes: of trees with 60 nodes, 4 under 5 are accepted far
    more often than 6 under 3.
    """
    sizes = [(c, b) for c in range(1, shape.children + 1) for b in range(1, shape.breadth + 1)]
    shapes = [shape.model_copy(update={"children": c, "breadth": b}) for c, b in sizes]
    fitting = [one for one in shapes if one.max_nodes <= num_nodes]
    return max(fitting, key=_width, default=None)


def _width(shape: TreeShape) -> tuple[int, int, int]:
    return min(shape.children, shape.breadth), shape.max_nodes, shape.children


class TreePlan(Settings):
    """The trees of greedy and of random decoding.

    Where tokens are drawn, drawn candidates are accepted more often than chosen ones.
    """

    greedy: TreeShape = TreeShape()
    sampling: TreeShape = TreeShape(children=2, breadth=2, sampled=True)

    @property
    def shapes(self) -> tuple[TreeShape, TreeShape]:
        """Both trees."""
        return self.greedy, self.sampling

    def shape(self, sampling: Sampling) -> TreeShape:
        """Return the tree for a request."""
        return self.sampling if sampling.do_sample else self.greedy

    @classmethod
    def of(cls, tree: "TreeShape | TreePlan") -> "TreePlan":
        """Return the plan that uses one shape throughout, or the plan itself."""
        return tree if isinstance(tree, TreePlan) else cls(greedy=tree, sampling=tree)
