"""Packed layers give equal products, follow changed weights, and leave the model unchanged."""

import pytest
import torch
from helpers.models import tiny_llama
from torch import nn
from torch.nn.functional import linear

from inference import SpeculativeDecoder
from inference.drafters.lookup import LookupDrafter
from jakiro.errors import TargetNotSupported
from jakiro.target import packed_linear
from jakiro.target.packed_linear import PackedLinear, can_pack, packed_copy

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
def test_products_are_those_of_the_layer(
    dtype: torch.dtype, has_bias: bool, shape: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(32, 48, bias=has_bias).to(dtype)
    x = torch.randn(*shape, 32, dtype=dtype)
    for pack_single in (False, True):
        product = PackedLinear(layer, pack_single=pack_single)(x)
        assert product.dtype == dtype
        bound = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(product, layer(x), atol=bound, rtol=bound)


def test_a_weight_that_changes_is_packed_again() -> None:
    layer = nn.Linear(16, 8)
    packed, x = PackedLinear(layer), torch.randn(4, 16)
    packed(x)
    with torch.no_grad():
        layer.weight.mul_(3.0)
    torch.testing.assert_close(packed(x), linear(x, layer.weight, layer.bias))
    layer.weight = nn.Parameter(torch.randn(8, 16))
    torch.testing.assert_close(packed(x), linear(x, layer.weight, layer.bias))


def test_the_copy_shares_all_tensors_and_the_model_is_unchanged() -> None:
    model = tiny_llama()
    before = {name: type(module) for name, module in model.named_modules()}
    copied = packed_copy(model.model)
    assert {name: type(module) for name, module in model.named_modules()} == before
    own = {tensor.data_ptr() for tensor in model.parameters()}
    assert {tensor.data_ptr() for tensor in copied.parameters()} <= own
    assert sum(type(module) is PackedLinear for module in copied.modules()) == 3 * 7
    ids = torch.arange(12)[None]
    torch.testing.assert_close(
        copied(input_ids=ids).last_hidden_state, model.model(input_ids=ids).last_hidden_state
    )


def test_decoding_with_packed_layers_gives_the_targets_tokens() -> None:
    model = tiny_llama()
    decoder = SpeculativeDecoder(model, LookupDrafter(), packed=True, tree="fixed")
    assert decoder.target.modules.is_packed
    prompt = [5, 6, 7, 5, 6, 7, 5, 6]
    expected = SpeculativeDecoder(tiny_llama()).generate(prompt, max_new_tokens=40)
    assert decoder.generate(prompt, max_new_tokens=40).new_token_ids == expected.new_token_ids
    assert model.generate(torch.tensor([prompt]), max_new_tokens=40).tolist() == [
        [*prompt, *expected.new_token_ids]
    ]


def test_unsuitable_models_are_not_packed() -> None:
    assert can_pack(tiny_llama())
    assert not can_pack(tiny_llama().to(torch.float16))
    assert not can_pack(tiny_llama().to("meta"))
    assert not can_pack(nn.Embedding(3, 4))
    with pytest.raises(TargetNotSupported, match=r"cannot be reordered.*got: float16 on cpu"):
        SpeculativeDecoder(tiny_llama().to(torch.float16), packed=True)


def test_without_the_operators_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise AttributeError("no such operator")

    packed_linear._works.cache_clear()
    monkeypatch.setattr(packed_linear, "reordered", missing)
    assert not can_pack(tiny_llama())
    packed_linear._works.cache_clear()


def test_a_replaced_weight_of_the_model_is_noticed() -> None:
    layer = torch.nn.Linear(32, 48)
    model = torch.nn.Sequential(layer)
    packed, x = packed_copy(model), torch.randn(3, 32)
    with torch.inference_mode():
        assert torch.allclose(packed(x), model(x), atol=1e-4)
        layer.weight = torch.nn.Parameter(torch.randn(48, 32))
        assert torch.allclose(packed(x), model(x), atol=1e-4)
