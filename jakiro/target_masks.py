"""Visibility as the target's layers want it: additive masks, one for each kind of layer."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from jakiro.target_checks import CHUNKED, SLIDING

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
