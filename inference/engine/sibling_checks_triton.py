"""The checks of all children of a node in Triton, with one program for each sequence.

Triton must be installed to import this module.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference.engine.siblings import Siblings
from inference.engine.support import Support


def check_by_triton(support: Support, siblings: Siblings) -> tuple[Tensor, Tensor, Tensor]:
    """Return the fields of `sibling_checks.Checks`, up to the rounding of sums.

    Args:
        support: target and draft probabilities after the node.
        siblings: at least one column of children, whose tokens are the last ids of the support.
    """
    batch, size = support.ids.shape
    count = siblings.node.shape[1]
    target_prob = support.target.new_empty(batch, count)
    draft_prob, residual = torch.empty_like(target_prob), torch.empty_like(support.target)
    with torch.cuda.device_of(support.outside):
        _check[(batch,)](
            support.target,
            support.outside,
            support.target if support.draft is None else support.draft,  # not read without samples
            support.columns_of_last(count).contiguous(),
            siblings.is_valid.contiguous(),
            siblings.is_sampled.contiguous(),
            target_prob,
            draft_prob,
            residual,
            size,
            count,
            triton.next_power_of_2(size),
            torch.finfo(torch.float64).tiny,
            enable_fp_fusion=False,  # so that sums are rounded as in torch
        )
    return target_prob, draft_prob, residual


@triton.jit  # type: ignore[untyped-decorator]
def _check(  # type: ignore[no-untyped-def]
    target,
    outside,
    draft,
    column,
    is_valid,
    is_sampled,
    target_prob,
    draft_prob,
    residual,
    size,
    count,
    BLOCK: tl.constexpr,  # noqa: N803
    SMALLEST: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, BLOCK)
    cells, is_inside = row * size + ids, ids < size
    weights = tl.load(target + cells, mask=is_inside, other=0.0)
    unused = tl.load(draft + cells, mask=is_inside, other=0.0)
    elsewhere = tl.load(outside + row)
    total = tl.sum(weights, 0) + elsewhere
    last = weights
    # The first child is sampled from the recorded distribution as it is.
    divisor = tl.full((), 1.0, tl.float64)
    for order in range(count):
        cell = row * count + order
        is_token = (ids == tl.load(column + cell)) & (tl.load(is_valid + cell) != 0)
        is_removed = is_token & (tl.load(is_sampled + cell) != 0)
        point_mass = tl.where(is_token, 1.0, 0.0).to(weights.dtype)
        own = tl.where(tl.load(is_sampled + cell) != 0, unused / divisor, point_mass)
        tl.store(target_prob + cell, tl.sum(tl.where(is_token, weights, 0.0), 0) / total)
        tl.store(draft_prob + cell, tl.sum(tl.where(is_token, own, 0.0), 0))
        excess = weights - total * own
        weights = tl.where(excess < 0, 0.0, excess)  # NaN stays NaN
        total = tl.sum(weights, 0) + elsewhere
        last = tl.where(total != 0, weights, last)
        unused = tl.where(is_removed, 0.0, unused)
        divisor = tl.sum(unused, 0)
        divisor = tl.where(divisor > SMALLEST, divisor, SMALLEST)
    tl.store(residual + cells, last, mask=is_inside)
