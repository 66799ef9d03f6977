"""The RMS norm of few operators equals that of torch."""

import pytest
import torch

from moa.norm import RMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_norm_without_gradients_equals_that_of_torch(dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(0)
    norm = RMSNorm(48, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x = (scale * torch.randn(3, 5, 48)).to(dtype)
    x[0] += 100 * scale  # whose mean is far from 0
    with torch.no_grad():
        got = norm(x)
    torch.testing.assert_close(got, norm(x).detach())
