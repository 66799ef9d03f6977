"""Numbers of 8 bits: products are close to the layer's, rows are independent, nothing overflows."""

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from jakiro.target import int8
from jakiro.target.int8 import GROUP, Int8Linear, can_quantize, quantized_rows, restored_rows

IS_THERE = int8._can_multiply()
needs_products = pytest.mark.skipif(not IS_THERE, reason="torch lacks int8 products")


@pytest.mark.parametrize("width", [GROUP - 1, GROUP + 1])
def test_values_are_restored_to_within_half_a_level(width: int) -> None:
    rows = torch.randn(5, width, generator=torch.Generator().manual_seed(width)) * 3
    restored = restored_rows(quantized_rows(rows), width)
    largest = rows.abs().amax(dim=1, keepdim=True)
    assert restored.shape == rows.shape
    assert ((restored - rows).abs() <= largest * (0.51 / 127)).all()


def test_zeros_and_values_that_are_not_numbers_stay_finite() -> None:
    rows = torch.tensor([[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0], [1e-12, 0.0]])
    restored = restored_rows(quantized_rows(rows), 2)
    assert restored.isfinite().all()
    assert restored[0].tolist() == [0.0, 0.0]
    assert restored[1].tolist() == pytest.approx([0.0, 1.0], abs=0.01)


@needs_products
@pytest.mark.parametrize(
    ("dtype", "has_bias", "shape"),
    [
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
    assert error.numel() == 0 or error[..., 4:].abs().max() < 0.03 * x.float().abs().max()
    assert (product[..., 3] == (bias[3].float() if has_bias else 0)).all()


@needs_products
def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    torch.manual_seed(0)
    for in_features, out_features in ((32, 61), (576, 1000)):
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


def test_only_ordinary_matrices_on_the_cpu_are_quantized() -> None:
    weight = nn.Linear(8, 8).weight
    assert can_quantize(weight) == can_quantize(weight.half()) == IS_THERE
    for other in (weight.to("meta"), weight.int(), torch.randn(4, 4).to_sparse()):
        assert not can_quantize(other)


def test_without_right_products_nothing_is_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise AttributeError("no such operator")

    def wrong(quantized: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.zeros(len(quantized), 1)

    for name, fault in (("_pack", missing), ("_product", wrong)):
        int8._can_multiply.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(int8, name, fault)
            assert not can_quantize(torch.randn(4, 4))
    int8._can_multiply.cache_clear()
