"""Doubles of functions that are recorded as a CUDA graph, for tests without a GPU."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Double:
    """What all doubles of a recorded function keep."""

    def __init__(
        self,
        function: Callable[[], Tensor],
        state: Sequence[Tensor],
        device: torch.device,
        pool: object,
    ) -> None:
        super().__init__()
        self.function = function
        self.pool = pool
        self.state = state
        self.addresses = [tensor.data_ptr() for tensor in state]
        self.output: Tensor | None = None


class Replayed(_Double):
    """A double of a recorded function, whose results are overwritten by the next call."""

    def __call__(self) -> Tensor:
        """Run the function, after the last result was replaced."""
        if self.output is not None:
            self.output.fill_(-7)
        assert [tensor.data_ptr() for tensor in self.state] == self.addresses
        self.output = self.function()
        return self.output.clone()


class Recorded(_Double, TorchDispatchMode):
    """A double of a recorded function that repeats its operations, without its Python code.

    As in a CUDA graph, each operation reads and writes the tensors of the recording. What the host
    contributed, such as numbers and constant tensors, stays as it was recorded.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __call__(self) -> Tensor:
        """Repeat the operations, which the first call records."""
        if self.output is None:
            before = [tensor.clone() for tensor in self.state]
            self.function()  # allocates what stays
            self._restore(before)
            with self:
                self.output = self.function()
            self._restore(before)
        for function, args, kwargs, result in self.operations:
            repeated = function(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(repeated), strict=True):
                if isinstance(old, Tensor) and old is not new:
                    old.copy_(new)
        return self.output.clone()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run and record an operation, unless it only returns a view."""
        assert "_local_scalar_dense" not in func.name(), "the function waits for the device"
        result = func(*args, **(kwargs or {}))
        if _is_computed(func, args, result):
            self.operations.append((func, args, kwargs or {}, result))
        return result

    def _restore(self, values: Sequence[Tensor]) -> None:
        for tensor, value in zip(self.state, values, strict=True):
            tensor.copy_(value)


def _is_computed(func: Any, args: Sequence[Any], result: Any) -> bool:
    """Return whether an operation writes anything, instead of returning views of its arguments."""
    if func._schema.is_mutable:
        return True
    given = {_address(leaf) for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
    returned = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return any(_address(leaf) not in given for leaf in returned)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
