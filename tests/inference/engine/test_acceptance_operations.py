"""Acceptance takes few operations, because every operation costs time on a GPU."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from helpers.tables import Tables, TableSource, no_processors
from torch.utils._python_dispatch import TorchDispatchMode

from inference.engine import accept_batched
from inference.sampling.batch import BatchSampling
from inference.sampling.random_numbers import StepRandom
from inference.trees.builder import TreeBuilder
from inference.trees.shape import TreeShape


class OperationCounter(TorchDispatchMode):
    """Counter of the operations inside its context, except views."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation and count it."""
        if not _is_view(func):
            self.counts[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        """The number of operations."""
        return self.counts.total()


def _is_view(func: Any) -> bool:
    aliases = [result.alias_info for result in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


LEVELS = 4


def _operations(children: int, sampled: bool, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the number of operations that a GPU performs to accept candidates of four levels."""
    shape = TreeShape(
        autoregressive_levels=LEVELS,
        parallel_levels=0,
        children=children,
        breadth=1,
        num_nodes=LEVELS * children,
        sampled=sampled,
    )
    build = TreeBuilder(shape, BatchSampling([no_processors()]), StepRandom([(0,)])).build
    tree = build(TableSource(Tables(vocab=12, components=1, seed=3), (0,)), torch.tensor([1]))
    probs = torch.rand(tree.num_nodes + 1, 12).softmax(dim=-1)
    uniforms = torch.rand(1, tree.num_nodes + 1, dtype=torch.float64)
    monkeypatch.setattr(accept_batched._Descent, "_is_over", lambda descent: False)
    with OperationCounter() as counter:
        accept_batched.accept_paths(tree, lambda nodes: probs[nodes + 1], uniforms)
    return counter.total


@pytest.mark.parametrize(("children", "most"), [(2, 400), (4, 430), (10, 530)])
def test_sampled_candidates_take_few_operations(
    children: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _operations(children, True, monkeypatch) <= most
