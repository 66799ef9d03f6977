"""Memory at fixed addresses, which recorded functions refer to: trees, random numbers, copies.

The number of queries of a verification, with the root, is one of a few numbers, so that recorded
functions can verify trees of changing sizes. Missing nodes are padding: they are not valid, are
children of the root, and are never visited.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from inference.draft_tree import NUM_FIELDS, ROOT, DraftTree, SparseDistribution
from inference.engine.context import num_queries_for
from inference.sampling.random_numbers import StepRandom, StreamKey, numbers_of

_PADDING = (0, ROOT, 1, 0, 0, 0, 0)  # token, parent, depth, kind, rank, proposer, validity


class TreeForm(NamedTuple):
    """The sizes of trees on which the operations of their verification depend."""

    batch: int
    num_queries: int
    max_depth: int
    max_siblings: int
    num_recorded: int

    @classmethod
    def of(cls, tree: DraftTree, greedy_depth: int | None = None) -> "TreeForm":
        """Return the form with which trees are verified.

        Args:
            greedy_depth: largest depth of all trees in greedy decoding, where siblings are not
                checked one after the other, and further levels take no time; None in sampling.
        """
        batch, num_queries = len(tree.base_length), num_queries_for(1 + tree.num_nodes)
        if greedy_depth is not None and tree.num_nodes > 0:
            return cls(batch, num_queries, max(greedy_depth, tree.max_depth), 0, 0)
        recorded = 0 if tree.draft_probs is None else tree.draft_probs.ids.shape[2]
        return cls(batch, num_queries, tree.max_depth, tree.max_siblings, recorded)


class TreeBuffer:
    """Trees of one form, and the random numbers by which their candidates are accepted."""

    def __init__(
        self, form: TreeForm, base_length: Int[Tensor, " batch"], probs_like: Tensor | None
    ) -> None:
        self.form = form
        device, batch = base_length.device, form.batch
        self._padding = torch.tensor(_PADDING, device=device)[:, None]
        self._fields = self._padding.repeat(batch, 1, form.num_queries - 1)
        self._score = torch.zeros(batch, form.num_queries - 1, device=device)  # not used
        self._probs: SparseDistribution | None = None
        if probs_like is not None and form.num_recorded:
            shape = (batch, form.num_queries, form.num_recorded)
            ids = torch.zeros(shape, dtype=torch.long, device=device)
            self._probs = SparseDistribution(ids, probs_like.new_zeros(shape))
        self.uniforms: Float[Tensor, "batch queries"] = torch.zeros(
            batch, form.num_queries, dtype=torch.float64, device=device
        )
        self._base_length = base_length

    def fill(self, tree: DraftTree) -> Int[Tensor, "batch fields nodes"]:
        """Replace the trees, and return the tensor that was changed."""
        count = tree.num_nodes
        if count == 0:
            return self._fields
        self._fields[:, :, :count] = tree.packed().unflatten(1, (NUM_FIELDS, count))
        if count < self.form.num_queries - 1:
            self._fields[:, :, count:] = self._padding
        if self._probs is not None and tree.draft_probs is not None:
            self._probs.ids[:, : count + 1] = tree.draft_probs.ids
            self._probs.probs[:, : count + 1] = tree.draft_probs.probs
        return self._fields

    @property
    def tree(self) -> DraftTree:
        """The trees, whose tensors are those of the buffer."""
        token_ids, parent, depth, kind, rank, proposer_id, is_valid = self._fields.unbind(dim=1)
        return DraftTree(
            token_ids=token_ids,
            parent=parent,
            depth=depth,
            score=self._score,
            kind=kind,
            rank=rank,
            proposer_id=proposer_id,
            is_valid=is_valid.bool(),
            base_length=self._base_length,
            max_depth=self.form.max_depth,
            max_siblings=self.form.max_siblings,
            draft_probs=self._probs,
        )


class FixedRandom(StepRandom):
    """Random numbers at a fixed address, which are replaced before every decoding step.

    The numbers are those of `StepRandom`.
    """

    def __init__(self, device: torch.device, num_uniforms: int) -> None:
        super().__init__((), device, num_uniforms)
        self._num_exponentials = 0
        self._numbers: Tensor | None = None  # at the fixed address
        self._hosts: HostBuffers | None = None

    def replace(self, keys: Sequence[StreamKey]) -> None:
        """Copy the numbers of another step to the device, if any have been requested yet."""
        self._keys = keys
        if self._numbers is None or self._hosts is None:
            return
        numbers = numbers_of(keys, self._num_uniforms, self._num_exponentials)
        self._hosts.upload(numbers, self._numbers)

    def exponentials(
        self, shapes: Sequence[tuple[int, int]]
    ) -> list[Float[Tensor, "batch parents m"]]:
        """Return noise of the standard exponential distribution, for each level of the trees."""
        sizes = [prod(shape) for shape in shapes]
        numbers = self._with(sum(sizes))
        levels = numbers[:, self._num_uniforms :].split(sizes, dim=1)
        return [level.unflatten(1, shape) for level, shape in zip(levels, shapes, strict=True)]

    def uniforms(self, count: int) -> Float[Tensor, "batch count"]:
        """Return numbers in [0, 1), by which the candidates of each sequence are accepted.

        Args:
            count: number of numbers for each sequence, at most `num_uniforms`.
        """
        return self._with(self._num_exponentials)[:, :count]

    def _with(self, num_exponentials: int) -> Tensor:
        """Return the numbers, after allocating them at the first request."""
        if self._numbers is None or num_exponentials != self._num_exponentials:
            self._num_exponentials = num_exponentials
            host = numbers_of(self._keys, self._num_uniforms, num_exponentials)
            self._hosts = HostBuffers(host, self._device)
            self._numbers = host.to(self._device)
        return self._numbers


class HostBuffers:
    """Two buffers on the host, which take turns because a copy from or to one may be under way."""

    def __init__(self, like: Tensor, device: torch.device) -> None:
        self._is_pinned = device.type == "cuda"
        self._device = device
        shape, dtype = like.shape, like.dtype
        self._buffers = [
            torch.empty(shape, dtype=dtype, pin_memory=self._is_pinned) for _ in range(2)
        ]
        self._copied: list[torch.cuda.Event | None] = [None, None]

    def upload(self, values: Tensor, destination: Tensor) -> None:
        """Copy values to the device."""
        self._take_turns()
        if (copied := self._copied[0]) is not None:
            copied.synchronize()  # the last copy from this buffer, two uploads ago
        self._buffers[0].copy_(values)
        destination.copy_(self._buffers[0], non_blocking=True)
        self._copied[0] = self._event()

    def download(self, source: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start to copy a tensor to the host.

        Returns:
            The copy, which is overwritten by the next call but one; and the event after which it is
            complete, or None if it is complete already.
        """
        self._take_turns()
        self._buffers[0].copy_(source, non_blocking=True)
        self._copied[0] = self._event()
        return self._buffers[0], self._copied[0]

    def _take_turns(self) -> None:
        self._buffers.reverse()
        self._copied.reverse()

    def _event(self) -> torch.cuda.Event | None:
        if not self._is_pinned:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event
