"""Who may see whom: ancestry inside a draft tree, and visibility of cache slots."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from jakiro.target.checks import CHUNKED, SLIDING


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


Masks = Float[Tensor, "batch 1 queries slots"] | dict[str, Float[Tensor, "batch 1 queries slots"]]


class TargetMasks:
    """Makes the masks of some layers of a target.

    Args:
        layer_kinds: of these layers.
        window: positions that a sliding layer sees, its own included.
        chunk: positions per block of a chunked layer, which sees its own block only.
        like: a tensor with the dtype and device to use.
    """

    def __init__(
        self, layer_kinds: tuple[str, ...], window: int | None, chunk: int | None, like: Tensor
    ) -> None:
        self.kinds = sorted(set(layer_kinds))
        self._reach = {SLIDING: window, CHUNKED: chunk}
        extremes = like.new_tensor([0.0, torch.finfo(like.dtype).min])
        self._values = extremes.unbind()  # what a mask adds where a query may look, or not

    def __call__(
        self,
        visible: Bool[Tensor, "batch queries slots"],
        positions: Int[Tensor, "batch queries"],
        seen_positions: Int[Tensor, "batch slots"],
    ) -> Masks:
        """Return the mask of the only kind of layer, or one for each kind.

        Args:
            visible: which slots each query may see in a layer without window.
            positions: of the queries.
            seen_positions: of the tokens in the slots: a node's slot lies beyond its position.
        """
        masks = {
            kind: self._additive(kind, visible, positions, seen_positions) for kind in self.kinds
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _additive(self, kind: str, visible: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        reach = self._reach.get(kind)
        if reach is not None:
            visible = visible & _within(reach, kind, positions[:, :, None], seen[:, None, :])
        looks, blocked = self._values
        return torch.where(visible, looks, blocked).unsqueeze(1)


def positions_in_slots(
    slots: Int[Tensor, "batch written"], positions: Int[Tensor, "batch written"], num_slots: int
) -> Int[Tensor, "batch slots"]:
    """Return the position of the token in each slot: the slot itself, but for what was written."""
    seen = torch.arange(num_slots, device=slots.device).expand(len(slots), -1)
    return seen.scatter(1, slots, positions)


def _within(reach: int, kind: str, own: Tensor, seen: Tensor) -> Tensor:
    """Return which slots lie within each query's window or chunk."""
    return own // reach == seen // reach if kind == CHUNKED else own - seen < reach
