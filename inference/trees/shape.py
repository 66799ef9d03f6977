"""Shapes of draft trees, and the reduction of shapes to a budget."""

from functools import lru_cache
from typing import Literal

from pydantic import Field

from inference.protocol import Budget
from inference.sampling.options import Sampling
from inference.trees import MAX_PASSES, MOST_CANDIDATES
from jakiro.utils.settings import Settings


class TreeShape(Settings):
    """The shape of a draft tree: number of levels, width, size, and kind of candidates.

    Example:
        shape = TreeShape(autoregressive_levels=3, parallel_levels=0, children=4, num_nodes=12)
        drafter = JakiroDrafter.from_pretrained(drafter_path)
        decoder = SpeculativeDecoder(target, drafter, tokenizer, tree=shape)
        output = decoder.generate("a b a", max_new_tokens=16)
    """

    autoregressive_levels: int = Field(2, ge=1, le=MAX_PASSES)  # number of drafter passes
    # number of further levels, predicted by the last pass
    parallel_levels: int = Field(1, ge=0, le=MAX_PASSES)
    # number of candidates under each expanded node
    children: int = Field(3, ge=1, le=MOST_CANDIDATES)
    breadth: int = Field(2, ge=1, le=MOST_CANDIDATES)  # number of expanded nodes per level
    # number of candidates that a deterministic tree keeps
    num_nodes: int = Field(8, ge=1, le=MOST_CANDIDATES)
    sampled: bool = False  # whether candidates are sampled, without replacement

    @property
    def depth(self) -> int:
        """The number of levels of the tree."""
        return self.autoregressive_levels + self.parallel_levels

    @property
    def level_sizes(self) -> list[int]:
        """The number of candidates at each depth, before the best are selected."""
        sizes = [self.children]
        for _ in range(self.depth - 1):
            sizes.append(self.children * min(self.breadth, sizes[-1]))
        return sizes

    @property
    def max_nodes(self) -> int:
        """The largest number of nodes of a tree, for which verification must have room."""
        everything = sum(self.level_sizes)
        return everything if self.sampled else min(self.num_nodes, everything)

    def within(self, budget: Budget) -> "TreeShape | None":
        """Return the shape reduced to a budget; None if no tree fits.

        Passes are removed first, then parallel levels. A deterministic tree loses its worst
        candidates. In a sampled tree, fewer candidates are sampled, because no candidate may be
        removed after sampling.
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
    """Return the widest sampled shape of this depth that has at most `num_nodes` nodes, or None.

    The width of a shape is the smaller of `children` and `breadth`. In a tree of 60 nodes, far more
    candidates are accepted if each level has 5 expanded nodes with 4 children than if each level
    has 3 expanded nodes with 6 children. The result is None if not even a chain fits.
    """
    sizes = [(c, b) for c in range(1, shape.children + 1) for b in range(1, shape.breadth + 1)]
    shapes = [shape.model_copy(update={"children": c, "breadth": b}) for c, b in sizes]
    fitting = [narrow for narrow in shapes if narrow.max_nodes <= num_nodes]
    return max(fitting, key=_width, default=None)


def _width(shape: TreeShape) -> tuple[int, int, int]:
    return min(shape.children, shape.breadth), shape.max_nodes, shape.children


class TreePlan(Settings):
    """The tree shapes of greedy decoding and of sampling."""

    greedy: TreeShape = TreeShape()
    sampling: TreeShape = TreeShape(children=2, breadth=2, sampled=True)

    @property
    def shapes(self) -> tuple[TreeShape, TreeShape]:
        return self.greedy, self.sampling

    def shape(self, sampling: Sampling) -> TreeShape:
        """Return the shape of the trees for a request's sampling options."""
        return self.sampling if sampling.do_sample else self.greedy

    @classmethod
    def of(cls, tree: "TreeShape | TreePlan") -> "TreePlan":
        """Return a plan that always uses the given shape, or the given plan itself."""
        return tree if isinstance(tree, TreePlan) else cls(greedy=tree, sampling=tree)


# Trees of a decoder: sizes chosen in each decoding step, one fixed size, or shapes for a trained
# drafter.
Trees = TreeShape | TreePlan | Literal["auto", "fixed"]
