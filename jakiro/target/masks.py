"""Attention masks: ancestors in a draft tree, and the cache slots that a query may attend to."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from jakiro.target.checks import CHUNKED, SLIDING


def ancestor_matrix(
    parents: Int[Tensor, "batch nodes"], max_depth: int
) -> Bool[Tensor, "batch nodes nodes"]:
    """Return a matrix in which each node's row is True at its ancestors and at the node itself.

    Args:
        parents: index of each node's parent, or -1 for a node whose parent is not in the list.
        max_depth: upper bound on the number of nodes of any path.
    """
    count = parents.shape[1]
    if count == 1:
        return torch.ones_like(parents, dtype=torch.bool).unsqueeze(-1)
    nodes = torch.arange(count, device=parents.device)
    reach = ((parents.unsqueeze(-1) == nodes) | (nodes[:, None] == nodes)).float()
    steps = 1
    while steps < max_depth - 1:  # after k squarings, paths of up to 2^k + 1 nodes are complete
        reach = (reach @ reach).clamp(max=1.0)
        steps *= 2
    return reach.bool()


def same_document(
    documents: Int[Tensor, "batch tokens"],
) -> Bool[Tensor, "batch tokens tokens"]:
    """Return True for each pair of tokens in a packed sequence that are in the same document."""
    return documents[:, :, None] == documents[:, None, :]


def slot_mask(
    lengths: Int[Tensor, " batch"],
    slots: Int[Tensor, "batch written"],
    seen: Bool[Tensor, "batch queries written"],
    num_slots: int,
) -> Bool[Tensor, "batch queries slots"]:
    """Return True for each slot that a query may attend to.

    A query attends to every committed slot (below its sequence's length) and, among the slots of
    uncommitted nodes, to those that `seen` marks.

    Args:
        lengths: number of committed tokens per sequence; a committed token's slot is its position.
        seen: True where a query may attend to an uncommitted node, which is the query itself or
            one of its ancestors.
        num_slots: number of slots, starting from slot 0, that the mask covers.
    """
    committed = torch.arange(num_slots, device=slots.device) < lengths[:, None]
    mask = committed[:, None, :].expand(-1, seen.shape[1], -1).clone()
    return mask.scatter_(2, slots[:, None, :].expand_as(seen), seen)


Masks = Float[Tensor, "batch 1 queries slots"] | dict[str, Float[Tensor, "batch 1 queries slots"]]


class TargetMasks:
    """Builds the attention masks of a target's layers, or of a subset of the layers.

    Args:
        window: number of positions, including the query's own, that a query attends to in a layer
            with sliding attention; None if the target has no window.
        chunk: number of positions per block in a layer with chunked attention, where a query
            attends only to its own block; None if the target has no chunks.
    """

    def __init__(
        self, layer_kinds: tuple[str, ...], window: int | None, chunk: int | None, like: Tensor
    ) -> None:
        self.kinds = sorted(set(layer_kinds))
        self._reach = {SLIDING: window, CHUNKED: chunk}
        # Half of the lowest number: a score that is added to it never becomes infinite.
        extremes = like.new_tensor([0.0, torch.finfo(like.dtype).min / 2])
        self._values = extremes.unbind()  # added to the scores of visible and of hidden slots

    @property
    def reads_positions(self) -> bool:
        """Whether some layer attends only to positions near the query."""
        return any(self._reach.get(kind) is not None for kind in self.kinds)

    def __call__(
        self,
        visible: Bool[Tensor, "batch queries slots"],
        positions: Int[Tensor, "batch queries"],
        seen_positions: Int[Tensor, "batch slots"] | None,
    ) -> Masks:
        """Return one mask if all layers are of the same kind, otherwise a mask for each kind.

        Args:
            seen_positions: absolute position of the token in each slot. For a draft node, the
                position can differ from the slot. None if no layer `reads_positions`.
        """
        masks = {
            kind: self._additive(kind, visible, positions, seen_positions) for kind in self.kinds
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _additive(
        self, kind: str, visible: Tensor, positions: Tensor, seen: Tensor | None
    ) -> Tensor:
        reach = self._reach.get(kind)
        if reach is not None:
            assert seen is not None
            visible = visible & _within(reach, kind, positions[:, :, None], seen[:, None, :])
        shown, hidden = self._values
        return torch.where(visible, shown, hidden).unsqueeze(1)


def positions_in_slots(
    slots: Int[Tensor, "batch written"], positions: Int[Tensor, "batch written"], num_slots: int
) -> Int[Tensor, "batch slots"]:
    """Return the absolute position of the token in each slot.

    Args:
        positions: absolute positions of the nodes; the position of any other token equals its slot.
    """
    seen = torch.arange(num_slots, device=slots.device).expand(len(slots), -1)
    return seen.scatter(1, slots, positions)


def _within(reach: int, kind: str, own: Tensor, seen: Tensor) -> Tensor:
    """Return True for each slot whose position lies in a query's window or chunk."""
    return own // reach == seen // reach if kind == CHUNKED else own - seen < reach
