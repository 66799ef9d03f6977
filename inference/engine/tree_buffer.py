"""Trees of changing sizes at fixed addresses, so that recorded functions can verify all of them.

The number of queries of a verification, with the root, is one of a few numbers. Missing nodes are
padding: they are not valid, are children of the root, and are never visited.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from inference.draft_tree import NUM_FIELDS, ROOT, DraftTree, SparseDistribution

QUERY_CLASSES = (1, 8, 16, 32, 64)  # beyond these: multiples of the last one
_PADDING = (0, ROOT, 1, 0, 0, 0, 0)  # token, parent, depth, kind, rank, proposer, validity


def num_queries_for(count: int) -> int:
    """Return the number of queries with which `count` queries are verified."""
    largest = QUERY_CLASSES[-1]
    multiple = -(-count // largest) * largest
    return next((own for own in QUERY_CLASSES if own >= count), multiple)


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
