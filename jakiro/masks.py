"""Who may see whom: ancestry inside a draft tree, and visibility of cache slots."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def ancestor_matrix(
    parents: Int[Tensor, "batch nodes"], max_depth: int
) -> Bool[Tensor, "batch nodes nodes"]:
    """Return for each node (row) which nodes lie on its path, itself included.

    Args:
        parents: index of each node's parent, or -1 for a node whose parent is not in the list.
        max_depth: an upper bound on the number of nodes on any path.
    """
    count = parents.shape[1]
    if count == 1:
        return torch.ones_like(parents, dtype=torch.bool).unsqueeze(-1)
    nodes = torch.arange(count, device=parents.device)
    reach = ((parents.unsqueeze(-1) == nodes) | (nodes[:, None] == nodes)).float()
    steps = 1
    while steps < max_depth - 1:  # doubling: after k squarings paths of 2^k + 1 nodes are complete
        reach = (reach @ reach).clamp(max=1.0)
        steps *= 2
    return reach.bool()


def same_document(
    documents: Int[Tensor, "batch rows"],
) -> Bool[Tensor, "batch rows rows"]:
    """Return which rows of a packed sequence belong to the same document."""
    return documents[:, :, None] == documents[:, None, :]


def slot_mask(
    lengths: Int[Tensor, " batch"],
    slots: Int[Tensor, "batch written"],
    seen: Bool[Tensor, "batch queries written"],
    num_slots: int,
) -> Bool[Tensor, "batch queries slots"]:
    """Return which slots each query may attend to (True: may see).

    A query sees every committed slot (below its sequence's length) and, among the slots written
    since, those that `seen` grants it.

    Args:
        lengths: committed rows of each sequence; a committed row's slot is its position.
        slots: slots written since.
        seen: which of them each query may see; its ancestors and itself.
        num_slots: how many slots, from 0, the mask covers.
    """
    committed = torch.arange(num_slots, device=slots.device) < lengths[:, None]
    mask = committed[:, None, :].expand(-1, seen.shape[1], -1).clone()
    return mask.scatter_(2, slots[:, None, :].expand_as(seen), seen)
