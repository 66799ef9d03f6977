"""Copies of weights in other formats, which are made again whenever the weights change."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from torch import Tensor, nn

CopyT = TypeVar("CopyT")


class WeightCopy(Generic[CopyT]):
    """A layer's weight and bias in another format; made on first use, and again after a change."""

    def __init__(self, source: nn.Module | Tensor, convert: Callable[..., CopyT]) -> None:
        self.source = source
        self._convert = convert
        self._copy: CopyT | None = None
        self._version: object = None

    @classmethod
    def shared(
        cls, source: nn.Module | Tensor, convert: Callable[..., CopyT]
    ) -> "WeightCopy[CopyT]":
        """Return the copy of the same source by the same function that is in use, or a new one."""
        key = id(source), convert
        known = _in_use.get(key)
        if known is None:
            known = _in_use[key] = cls(source, convert)
        return known

    def __deepcopy__(self, memo: dict[int, Any]) -> "WeightCopy[CopyT]":
        """Return the copy of the copied source; itself if the source is shared and not copied."""
        source = deepcopy(self.source, memo)
        return self if source is self.source else WeightCopy.shared(source, self._convert)

    def current(self) -> CopyT:
        """Return the copy; it is made again if the source was replaced or changed in place."""
        tensors = self._tensors()
        version = [None if tensor is None else version_of(tensor) for tensor in tensors]
        if self._copy is None or version != self._version:
            self._copy, self._version = self._convert(*tensors), version
        return self._copy

    def _tensors(self) -> list[Tensor | None]:
        source: Any = self.source
        return [source] if isinstance(source, Tensor) else [source.weight, source.bias]


# By id of the source, which cannot be reused for another one because the value refers to it.
_in_use: WeakValueDictionary[tuple[int, Callable[..., Any]], WeightCopy[Any]] = (
    WeakValueDictionary()
)


def version_of(weight: Tensor) -> tuple[object, ...]:
    """Return a value that identifies a tensor and changes whenever the tensor is written to.

    Writing to `weight.data` is not noticed, because PyTorch does not count it.
    """
    version = 0 if weight.is_inference() else weight._version
    return weight.data_ptr(), version, weight.device, weight.dtype
