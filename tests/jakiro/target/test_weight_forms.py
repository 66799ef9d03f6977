"""Formats of weights: where each of them is possible, and the products with them."""

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from jakiro.target import weight_forms
from jakiro.target.packed_linear import can_reorder
from jakiro.target.weight_forms import WEIGHT_FORMS, WeightForm, allows_form, product_with

BOUNDS = {"own": 0.0, "packed": 1e-5, "bfloat16": 0.03, "int8": 0.05}
NO_BF16 = not can_reorder(torch.ones(1, 1), torch.bfloat16)


@pytest.mark.parametrize("form", WEIGHT_FORMS)
@pytest.mark.parametrize("has_bias", [False, True])
@torch.no_grad()
def test_products_are_close_to_the_exact_ones(form: WeightForm, has_bias: bool) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(40, 96) / 10, torch.randn(2, 3, 96)
    if not allows_form(nn.Parameter(weight), form):
        pytest.skip(f"this machine does not compute with {form}")
    bias = torch.randn(40) if has_bias else None
    expected = linear(x, weight, bias)
    product = product_with(weight, bias, form)(x)
    assert product.dtype == torch.float32
    torch.testing.assert_close(product, expected, atol=BOUNDS[form], rtol=BOUNDS[form])
    assert (form == "own") == torch.equal(product, expected) or form == "packed"


def test_bfloat16_needs_float32_weights_and_a_processor_that_computes_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for is_native in (False, True):
        monkeypatch.setattr(
            weight_forms, "computes_bfloat16", lambda is_native=is_native: is_native
        )
        expected = is_native and not NO_BF16
        assert allows_form(nn.Linear(8, 8), "bfloat16") == expected
        assert not allows_form(nn.Linear(8, 8).bfloat16(), "bfloat16")
        assert not allows_form(nn.Linear(8, 8).half(), "bfloat16")
        assert not allows_form(nn.Linear(8, 8, device="meta"), "bfloat16")


def test_layers_and_weights_of_other_kinds_have_only_their_own_form() -> None:
    class OwnKind(nn.Linear):
        """A stand-in for a quantized layer."""

    class OwnFormat(torch.Tensor):
        """A stand-in for a weight in another library's format."""

    other = torch.randn(8, 8).as_subclass(OwnFormat)
    for source in (OwnKind(8, 8), nn.Embedding(8, 8), other, nn.Parameter(other)):
        assert [form for form in WEIGHT_FORMS if allows_form(source, form)] == ["own"]
