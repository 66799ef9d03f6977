"""The children of every node of a batch of trees, as tables on the device.

For the tree in `inference.draft_tree`, the table of nodes is

    parent       ROOT    0       1       2       3       4
    children     0 1     2 3     - -     4 -     - -     - -
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from inference.draft_tree import ROOT, CandidateKind, DraftTree


class Siblings(NamedTuple):
    """The children of one node of each sequence, in the order of checks."""

    node: Int[Tensor, "batch siblings"]
    token: Int[Tensor, "batch siblings"]
    is_valid: Bool[Tensor, "batch siblings"]
    is_sampled: Bool[Tensor, "batch siblings"]


class ChildTable:
    """The valid children of ROOT (index 0) and of node n (index n + 1), with their tokens.

    Args:
        vocab: size of the vocabulary. Ids outside the vocabulary are only clamped here, because
            they are rejected on the host.
    """

    def __init__(self, tree: DraftTree, vocab: int) -> None:
        nodes = _children(tree)
        index = nodes.clamp(min=0).flatten(1)
        tokens = tree.token_ids.clamp(0, vocab - 1).gather(1, index).view_as(nodes)
        kinds = tree.kind.gather(1, index).view_as(nodes)
        is_valid = nodes != ROOT
        is_sampled = is_valid & (kinds == CandidateKind.SAMPLED)
        self._candidates = torch.stack((nodes, tokens), dim=2)
        self._flags = torch.stack((is_valid, is_sampled), dim=2)
        self._every = torch.arange(len(nodes), device=nodes.device)

    def under(self, parent: Int[Tensor, " batch"]) -> Siblings:
        """Return the children of one node (or ROOT) of each sequence."""
        here = self._every, parent + 1
        return Siblings(*self._candidates[here].unbind(dim=1), *self._flags[here].unbind(dim=1))


def _children(tree: DraftTree) -> Int[Tensor, "batch parents siblings"]:
    """Return the valid children of every node in the order of checks, padded with ROOT.

    Sampled children come first, in the order of sampling.
    """
    batch, count = tree.token_ids.shape
    table = tree.parent.new_full((batch, (count + 1) * (tree.max_siblings + 1)), ROOT)
    nodes = torch.arange(count, device=table.device)
    order_key = torch.where(tree.kind == CandidateKind.SAMPLED, tree.rank, count + nodes)
    are_siblings = tree.parent[:, :, None] == tree.parent[:, None, :]
    is_earlier = (
        are_siblings & tree.is_valid[:, None, :] & (order_key[:, None, :] < order_key[:, :, None])
    )
    # The last column receives the invalid nodes, and is removed at the end.
    order = torch.where(tree.is_valid, is_earlier.sum(dim=-1), tree.max_siblings)
    cells = (tree.parent + 1) * (tree.max_siblings + 1) + order
    table.scatter_(1, cells, nodes.expand(batch, -1))
    return table.unflatten(1, (count + 1, -1))[:, :, : tree.max_siblings]
