"""Int8 layers: products are close to the layer's, rows are independent, and nothing overflows."""

import pytest
import torch
from helpers.models import tiny_llama
from torch import nn
from torch.nn.functional import linear

from jakiro.target import int8_linear
from jakiro.target.int8_linear import Int8Linear, can_quantize

IS_THERE = int8_linear._input_levels() is not None
needs_products = pytest.mark.skipif(not IS_THERE, reason="torch lacks int8 products")


@needs_products
@pytest.mark.parametrize(
    ("dtype", "has_bias", "shape"),
    [
        (torch.float32, False, (1,)),
        (torch.float32, True, (2, 3, 1)),
        (torch.bfloat16, True, (4,)),
        (torch.float16, False, (2, 0)),
    ],
    ids=str,
)
def test_products_are_close_to_those_of_the_layer(
    dtype: torch.dtype, has_bias: bool, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(48, 96, dtype=dtype), torch.randn(48, dtype=dtype)
    weight[3] = 0
    weight[4] *= 1000  # a channel with its own scale does not spoil the others
    x = torch.randn(*shape, 96, dtype=dtype)
    product = Int8Linear(weight, bias if has_bias else None)(x)
    expected = linear(x.float(), weight.float(), bias.float() if has_bias else None)
    assert product.dtype == torch.float32
    assert product.shape == (*shape, 48)
    error = (product - expected) / weight.float().norm(dim=1).clamp(min=1e-6)
    assert error.numel() == 0 or error[..., 5:].abs().max() < 0.03 * x.float().abs().max()
    assert error.numel() == 0 or error[..., 4].abs().max() < 0.03 * x.float().abs().max()
    rest = torch.zeros(1) if bias is None or not has_bias else bias[3].float()
    assert (product[..., 3] == rest).all()


@needs_products
def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    torch.manual_seed(0)
    for in_features, out_features in ((32, 61), (96, 512), (576, 1000)):
        layer = Int8Linear(torch.randn(out_features, in_features), torch.randn(out_features))
        x = torch.randn(40, in_features) * torch.logspace(-6, 6, 40)[:, None]
        together = layer(x)
        for count in (1, 2, 3, 7, 16, 33):
            assert torch.equal(layer(x[:count]), together[:count])
            assert torch.equal(layer(x[-count:].flip(0)), together[-count:].flip(0))


@needs_products
def test_the_largest_inputs_and_weights_do_not_overflow() -> None:
    layer = Int8Linear(torch.full((40, 512), 3.0))
    x = torch.stack((torch.full((512,), 2.0), torch.full((512,), -0.5)))
    expected = torch.tensor([[3072.0], [-768.0]]).expand(-1, 40)
    torch.testing.assert_close(layer(x), expected)


@needs_products
def test_rows_that_are_not_finite_stay_so_and_spoil_no_others() -> None:
    torch.manual_seed(0)
    layer, x = Int8Linear(torch.randn(8, 16)), torch.randn(4, 16)
    alone = layer(x[3:])
    x[0, 2], x[1, 3], x[2] = torch.nan, torch.inf, 0.0
    product = layer(x)
    assert not product[:2].isfinite().any()
    assert (product[2] == 0).all()
    assert torch.equal(product[3:], alone)


@needs_products
def test_weights_are_quantized_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(50, 24), torch.randn(3, 24)
    whole = Int8Linear(weight)(x)
    monkeypatch.setattr(int8_linear, "_CHUNK", 7)
    assert torch.equal(Int8Linear(weight)(x), whole)


def test_only_ordinary_matrices_on_the_cpu_are_quantized() -> None:
    head = tiny_llama().lm_head
    assert can_quantize(head.weight) == IS_THERE
    assert can_quantize(head.weight.half()) == IS_THERE
    assert not can_quantize(head.weight.to("meta"))
    assert not can_quantize(head.weight.int())
    assert not can_quantize(torch.randn(4, 4).to_sparse())

    class OwnFormat(torch.Tensor):
        """A stand-in for a weight in another library's format."""

    assert not can_quantize(head.weight.detach().as_subclass(OwnFormat))
    assert not can_quantize(nn.Parameter(head.weight.detach().as_subclass(OwnFormat)))


def test_without_right_products_nothing_is_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise AttributeError("no such operator")

    def wrong(quantized: torch.Tensor, levels: int, *_: object) -> torch.Tensor:
        return torch.zeros(len(quantized), 1)

    for name, fault in (("_packed", missing), ("_product", wrong)):
        int8_linear._input_levels.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(int8_linear, name, fault)
            assert not can_quantize(torch.randn(4, 4))
    int8_linear._input_levels.cache_clear()
