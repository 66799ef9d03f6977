"""The target's input for roots and the draft trees below them."""

import torch
from jaxtyping import Int
from torch import Tensor

from inference.draft_tree import DraftTree
from jakiro.target.adapter import TargetSpec
from jakiro.target.step import StepInput


def tree_step(
    tree: DraftTree,
    roots: Int[Tensor, "batch 1"],
    spec: TargetSpec,
    highest: int,
    start: int | None = None,
) -> StepInput:
    """Return a target step that reads roots and trees; node n is query n + 1.

    Args:
        start: length of the only sequence; None if there are several, or it is not known here.
    """
    drafts = tree.token_ids.clamp(0, spec.vocab_size - 1)
    base = tree.base_length[:, None]
    positions = torch.cat((base, base + tree.depth), dim=1)
    count = tree.num_nodes + 1
    return StepInput(
        token_ids=torch.cat((roots, drafts), dim=1),
        positions=positions.clamp(max=spec.max_position - 1),
        slots=base + torch.arange(count, device=base.device),
        lengths=tree.base_length,
        highest_slot=highest + count - 1,
        parents=torch.cat((torch.full_like(base, -1), tree.parent + 1), dim=1),
        max_depth=tree.max_depth + 1,
        start=start,
    )
