"""A least-squares start of what parallel levels know of the tokens before them on a path.

Let x_k(p) be the vector of level k below the root at position p, before anything is known of the
path. If the path is the text, then the first level below a root at p + k, x_0(p + k), predicts the
same token, and knows the text between. For each parallel level k, the difference
`x_0(p + k) - x_k(p)` is fitted to the embedding of the token at p + k and, in a recurrence, to the
target's feature at p + k - 1, by ridge regression on a part of the training data. The result is the
start of R_k and S_k (`PathFeatures`).
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter
from training.loss.batch import Batch, look_at_target
from training.loss.drafting import draft_all_positions

_RIDGE = 0.03  # penalty, as a share of the mean square of each kind of input


@torch.no_grad()
def start_path(drafter: JakiroDrafter, target: TargetAdapter, batches: Iterable[Batch]) -> None:
    path = drafter.path_features
    assert path is not None
    products: list[Tensor | float] = [0.0] * len(path.shifts)
    wanted = list(products)
    for batch in batches:
        for index, (read, goal) in enumerate(_rows_of_levels(drafter, target, batch)):
            products[index] += read.T @ read
            wanted[index] += read.T @ goal
    for shift, product, of_goal in zip(path.shifts, products, wanted, strict=True):
        assert isinstance(shift, nn.Linear)
        assert isinstance(product, Tensor)
        if product.any():  # otherwise no response is that long
            kinds = product.diagonal().split(target.spec.hidden_size)
            ridge = torch.cat([_RIDGE * kind.mean().expand(len(kind)) for kind in kinds])
            shift.weight.copy_(torch.linalg.solve(product + ridge.diag(), of_goal).T)


def _rows_of_levels(
    drafter: JakiroDrafter, target: TargetAdapter, batch: Batch
) -> Iterable[tuple[Float[Tensor, "n read"], Float[Tensor, "n hidden"]]]:
    """Yield inputs and goal of each parallel level, one row for each root that has all of them."""
    path, batch = drafter.path_features, _with_all_roots(batch.to(target.device))
    assert path is not None
    size, length = batch.token_ids.shape
    cache = target.new_cache(size, length, drafter.state_sources.hidden_states)
    view = look_at_target(target, batch, drafter.state_sources, cache).to(drafter.dtype)
    *_, output = draft_all_positions(drafter, view, batch, knows_path=False)
    vectors = output.features.mean(dim=3) if output.waiting is None else output.waiting
    for level in range(1, 1 + len(path.shifts)):
        exists = batch.targets_exist(1 + level)[:, 1:-level] & (batch.positions[:, 1:-level] > 0)
        goal = vectors[:, 1 + level :, 0] - vectors[:, 1:-level, level]
        read = view.embeddings[:, 1 + level :]
        if path.is_recurrent:
            read = torch.cat((read, view.features[:, level:-1]), dim=-1)
        yield read[exists].float(), goal[exists].float()


def _with_all_roots(batch: Batch) -> Batch:
    """Return the batch in which each position is drafted right behind its anchor."""
    index = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)
    before = torch.where(batch.positions > 0, index - 1, index).unsqueeze(1)
    return replace(batch, anchors=before.expand_as(batch.anchors))
