"""A small draft tree with branches of several depths, as the input of a forward pass."""

import torch

from jakiro.target.step import StepInput

#        0
#      / | \        queries of a step: 0 is the root
#     1  2  3
#    / \     \
#   4   5     6
#   |
#   7
PARENTS = [-1, 0, 0, 0, 1, 1, 3, 4]
DEPTHS = [0, 1, 1, 1, 2, 2, 2, 3]


def path_to(query: int) -> list[int]:
    """Return the queries on the path from the root to a query."""
    return [] if query < 0 else [*path_to(PARENTS[query]), query]


def tree_step(tokens: torch.Tensor, start: int) -> StepInput:
    """Return the step that reads eight tokens as this tree, with the root at position `start`."""
    count = tokens.shape[1]
    base = torch.tensor([[start]])
    return StepInput(
        token_ids=tokens,
        positions=base + torch.tensor([DEPTHS]),
        slots=base + torch.arange(count),
        lengths=torch.tensor([start]),
        highest_slot=start + count - 1,
        parents=torch.tensor([PARENTS]),
        max_depth=4,
    )
