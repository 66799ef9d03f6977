"""A least-squares start of what parallel levels know of the token before them on a path.

At position i, let e_i be the embedding of the token, f_i the target's feature. For each parallel
level k, the feature f_{i+k} is fitted to `[f_{i-1}; e_i; 1; e_{i+k}]`, by ridge regression on a
part of the training data. The matrix of the last part, which tells what the token at i + k adds to
what is known at i, is the start of R_k (`PathFeatures`).
"""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from jakiro.levels import PathFeatures
from jakiro.target.adapter import TargetAdapter
from training.loss.batch import Batch, read_batch

_RIDGE = 0.03  # penalty, as a share of the mean square of each kind of input


@torch.no_grad()
def start_path(path: PathFeatures, target: TargetAdapter, batches: Iterable[Batch]) -> None:
    """Set the matrices of the parallel levels to the least-squares solution."""
    num_levels, hidden = len(path.shifts), target.spec.hidden_size
    products = torch.zeros(num_levels, 3 * hidden + 1, 3 * hidden + 1, device=target.device)
    wanted = torch.zeros(num_levels, 3 * hidden + 1, hidden, device=target.device)
    for batch in batches:
        batch = batch.to(target.device)
        cache = target.new_cache(*batch.token_ids.shape)
        features = read_batch(target, batch, cache).features.float()
        embeddings = target.embed(batch.token_ids).float()
        for level in range(1, 1 + num_levels):
            read, goal = _rows(batch, features, embeddings, level)
            products[level - 1] += read.T @ read
            wanted[level - 1] += read.T @ goal
    for shift, product, of_goal in zip(path.shifts, products, wanted, strict=True):
        assert isinstance(shift, nn.Linear)
        if product.any():  # otherwise no response is that long
            shift.weight.copy_(_solve(product, of_goal, hidden)[-hidden:].T)


def _rows(
    batch: Batch, features: Tensor, embeddings: Tensor, level: int
) -> tuple[Float[Tensor, "n read"], Float[Tensor, "n hidden"]]:
    """Return inputs and goal of a level, one row for each position i that has all of them."""
    exists = batch.targets_exist(1 + level)[:, 1:-level] & (batch.positions[:, 1:-level] > 0)
    before, here, later = (
        features[:, : -level - 1],
        embeddings[:, 1:-level],
        embeddings[:, 1 + level :],
    )
    ones = torch.ones_like(here[..., :1])
    read = torch.cat((before, here, ones, later), dim=-1)
    return read[exists], features[:, 1 + level :][exists]


def _solve(product: Tensor, wanted: Tensor, hidden: int) -> Float[Tensor, "read hidden"]:
    kinds = product.diagonal().split((hidden, hidden, 1, hidden))
    ridge = torch.cat([_RIDGE * kind.mean().expand(len(kind)) for kind in kinds])
    return torch.linalg.solve(product + ridge.diag(), wanted)
