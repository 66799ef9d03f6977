"""Greedy acceptance of a batch of trees on the device, without synchronization.

The accepted paths are those of `accept.accept_greedy_path`. The number of operations depends on the
depth of the trees only, so that the operations can be recorded as a CUDA graph.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from inference.draft_tree import ROOT, DraftTree


def accept_greedy_paths(
    tree: DraftTree, best_tokens: Int[Tensor, "batch queries"]
) -> tuple[Int[Tensor, "batch depth"], Int[Tensor, " batch"]]:
    """Return the accepted path of every tree, padded with ROOT, and the next token.

    Args:
        tree: trees of all sequences.
        best_tokens: the target's most likely token after the root and after each node.
    """
    following = _following(tree, best_tokens)
    cell = torch.zeros_like(best_tokens[:, :1])  # of ROOT
    cells = [cell]
    for _ in range(tree.max_depth):
        cell = following.gather(1, cell)
        cells.append(cell)
    visited = torch.cat(cells, dim=1)
    is_end = visited > tree.num_nodes
    last = visited.masked_fill(is_end, 0).amax(dim=1, keepdim=True)  # parents come first
    path = (visited - 1).masked_fill(is_end, ROOT)[:, 1:]
    return path, best_tokens.gather(1, last)[:, 0]


def _following(tree: DraftTree, best_tokens: Tensor) -> Int[Tensor, "batch cells"]:
    """Return the accepted child of every node.

    ROOT is at index 0, and node n at index n + 1. The last index means that no child is accepted.
    """
    batch, count = tree.token_ids.shape
    parents = tree.parent + 1
    is_best = tree.is_valid & (tree.token_ids == best_tokens.gather(1, parents))
    own = torch.arange(1, count + 1, device=parents.device)
    following = parents.new_full((batch, count + 2), count + 1)
    return following.scatter_reduce_(1, parents, torch.where(is_best, own, count + 1), "amin")
