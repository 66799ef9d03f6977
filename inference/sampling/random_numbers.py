"""Random numbers that depend only on a request's seed and indices, and on the decoding step."""

from collections.abc import Sequence
from hashlib import blake2b
from math import prod
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

ACCEPTING, DRAFTING = 0, 1  # independent streams of random numbers in the same decoding step

StreamKey: TypeAlias = tuple[int, ...]


def random_stream(*key: int) -> np.random.Generator:
    """Return the stream of random numbers that a 128-bit hash of the key selects.

    Philox is counter-based (Salmon et al., 2011), so streams of different keys are independent.
    """
    hashed = blake2b(" ".join(map(str, key)).encode(), digest_size=16)
    return np.random.Generator(np.random.Philox(key=int.from_bytes(hashed.digest())))


class StepRandom:
    """The random numbers of one decoding step, which are copied to the device together.

    Drafters take exponential noise, if they sample candidates, and the engine takes uniform numbers
    to accept candidates. The numbers of a sequence depend neither on the other sequences nor on how
    many are requested: a longer request begins with the same numbers.
    """

    def __init__(
        self,
        keys: Sequence[StreamKey] = (),
        device: torch.device | str = "cpu",
        num_uniforms: int = 0,
    ) -> None:
        self._keys = keys
        self._device = torch.device(device)
        self._num_uniforms = num_uniforms
        self._uniforms = torch.empty(len(keys), 0, dtype=torch.float64, device=self._device)

    @classmethod
    def of(cls, uniforms: Float[Tensor, "batch count"]) -> "StepRandom":
        """Return random numbers with given uniform numbers, and without noise."""
        random = cls((), uniforms.device, uniforms.shape[1])
        random._uniforms = uniforms
        return random

    def exponentials(
        self, shapes: Sequence[tuple[int, int]]
    ) -> list[Float[Tensor, "batch parents m"]]:
        """Return noise with the standard exponential distribution, for each level of sampled trees.

        Args:
            shapes: number of parents, and number of tokens in each draft distribution, per level.
        """
        sizes = [prod(shape) for shape in shapes]
        copied = self._copied(numbers_of(self._keys, self._num_uniforms, sum(sizes)))
        self._uniforms, *levels = copied.split([self._num_uniforms, *sizes], dim=1)
        return [level.unflatten(1, shape) for level, shape in zip(levels, shapes, strict=True)]

    def uniforms(self, count: int) -> Float[Tensor, "batch count"]:
        """Return numbers in [0, 1), by which the candidates of each sequence are accepted."""
        if count > self._uniforms.shape[1]:
            self._uniforms = self._copied(numbers_of(self._keys, count, 0))
        return self._uniforms[:, :count]

    def _copied(self, host: Tensor) -> Float[Tensor, "batch count"]:
        if self._device.type == "cuda":
            host = host.pin_memory()
        return host.to(self._device, non_blocking=True)


def numbers_of(
    keys: Sequence[StreamKey], num_uniforms: int, num_exponentials: int
) -> Float[Tensor, "batch count"]:
    """Return the uniform numbers of each key, followed by the exponential numbers."""
    rows = [
        np.concatenate(
            (
                random_stream(*key, ACCEPTING).random(num_uniforms),
                random_stream(*key, DRAFTING).standard_exponential(num_exponentials),
            )
        )
        for key in keys
    ]
    return torch.from_numpy(np.stack(rows))
