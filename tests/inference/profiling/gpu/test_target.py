"""The most likely token of the target is the successor of the last one, by a wide margin."""

import pytest
import torch

from inference.profiling.gpu.cycle import Cycle
from inference.profiling.gpu.scale import QUICK
from inference.profiling.gpu.target import LOGIT, build_cycle_target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_token_is_followed_by_its_successor(dtype: torch.dtype) -> None:
    cpu = torch.device("cpu")
    cycle = Cycle(QUICK.geometry.vocab_size, cpu)
    model = build_cycle_target(QUICK.geometry, cycle, cpu, dtype)
    ids = torch.randint(QUICK.geometry.vocab_size, (4, 30))
    with torch.no_grad():
        logits = model(input_ids=ids).logits.float()
    assert logits.isfinite().all()
    assert torch.equal(logits.argmax(dim=-1), cycle.successor[ids])
    first, second = logits.topk(2, dim=-1).values.unbind(dim=-1)
    assert (first - second).min() > LOGIT / 4
