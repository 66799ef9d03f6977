"""Products with reordered weights are those of the layer."""

import pytest
import torch
from helpers.models import tiny_llama
from torch import nn

from jakiro.target import packed_linear
from jakiro.target.packed_linear import PackedLinear, can_pack

IS_THERE = packed_linear._works(torch.float32)
pytestmark = pytest.mark.skipif(not IS_THERE, reason="torch cannot multiply by reordered weights")
NO_BF16 = pytest.mark.skipif(
    not packed_linear._works(torch.bfloat16),
    reason="torch cannot multiply by reordered bfloat16 weights",
)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=NO_BF16)], ids=str
)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (1, 9), (3, 5)])
@torch.no_grad()
def test_products_are_those_of_the_layer(
    dtype: torch.dtype, has_bias: bool, shape: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(32, 48, bias=has_bias).to(dtype)
    x = torch.randn(*shape, 32, dtype=dtype)
    product = PackedLinear(layer.weight, layer.bias)(x)
    assert product.dtype == dtype
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(product, layer(x), atol=bound, rtol=bound)


def test_unsuitable_models_are_not_packed() -> None:
    assert can_pack(tiny_llama())
    assert not can_pack(tiny_llama().to(torch.float16))
    assert not can_pack(tiny_llama().to("meta"))
    assert not can_pack(nn.Embedding(3, 4))


def test_without_the_operators_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise AttributeError("no such operator")

    packed_linear._works.cache_clear()
    monkeypatch.setattr(packed_linear, "reordered", missing)
    assert not can_pack(tiny_llama())
    packed_linear._works.cache_clear()
