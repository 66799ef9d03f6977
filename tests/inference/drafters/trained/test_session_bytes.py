"""A drafter's `bytes_per_token` is the memory that its sessions allocate for each token."""

import pytest
import torch
from helpers.drafting import GREEDY
from helpers.models import tiny_drafter, tiny_llama
from helpers.variants import VARIANTS

from inference.drafters.trained.drafter import TrainedDrafter
from inference.drafters.trained.kv import DrafterCache
from inference.trees.shape import TreeShape
from jakiro.target.adapter import TargetAdapter

KINDS = ["E2-mixture-P1", "feedback-E1-P0", "hybrid-mixture-P2", "tail-2-E1", "hybrid-tail-1"]
KINDS += ["chimera", "gumiho", "tensor", "hidden-transfer"]


def _bytes_of(rows: DrafterCache) -> int:
    """Return the bytes of all memory behind a cache, with each block counted once."""
    parts = [part for buffer in rows.buffers for part in buffer.prefix(rows.capacity)]
    if rows.tail_cache is not None:
        parts += [
            part for layer in rows.tail_cache.slot_layers for part in (layer.keys, layer.values)
        ]
    blocks = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}
    return sum(blocks.values())


# The cache of a tail has the target's dtype, whatever the drafter's dtype is.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", KINDS)
def test_bytes_per_token_are_those_of_a_sessions_memory(name: str, dtype: torch.dtype) -> None:
    target, settings = TargetAdapter(tiny_llama()), VARIANTS[name]
    shape = TreeShape(parallel_levels=settings.schedule.parallel_levels)
    drafter = TrainedDrafter(tiny_drafter(target, settings).to(dtype), target, shape)
    rows = drafter.new_session(GREEDY, capacity=100, batch=3).cache
    assert _bytes_of(rows) == drafter.bytes_per_token * 3 * rows.capacity
