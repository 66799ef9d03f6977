"""Weights in other formats: where they are possible, products with them, and their copies."""

import re
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from helpers.models import tiny_llama
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear

from jakiro.target import weights
from jakiro.target.weights import (
    CONVERT,
    WEIGHT_FORMS,
    MappedMemory,
    PackedLinear,
    WeightCopy,
    WeightForm,
    allows_form,
    can_pack,
    can_reorder,
    version_of,
)

BOUNDS = {"own": 0.0, "packed": 1e-5, "bfloat16": 0.03, "int8": 0.05}
REORDERS, REORDERS_BF16 = (
    can_reorder(torch.ones(1, 1), dtype) for dtype in (torch.float32, torch.bfloat16)
)


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
    product = CONVERT[form](weight, bias)(x)
    assert product.dtype == torch.float32
    torch.testing.assert_close(product, expected, atol=BOUNDS[form], rtol=BOUNDS[form])
    assert (form == "own") == torch.equal(product, expected) or form == "packed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (3, 5)])
@torch.no_grad()
def test_reordered_layers_add_a_residual(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    if not can_reorder(torch.ones(1, 1), dtype):
        pytest.skip("torch cannot multiply by reordered weights")
    torch.manual_seed(0)
    layer = nn.Linear(32, 48).to(dtype)
    x, residual = torch.randn(*shape, 32, dtype=dtype), torch.randn(*shape, 48, dtype=dtype)
    packed = PackedLinear(layer.weight, layer.bias)
    bound = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(packed(x), layer(x), atol=bound, rtol=bound)
    torch.testing.assert_close(packed(x, residual), layer(x) + residual, atol=bound, rtol=bound)


def test_unsuitable_models_are_not_packed() -> None:
    assert can_pack(tiny_llama()) == REORDERS
    assert not can_pack(tiny_llama().to(torch.float16))
    assert not can_pack(tiny_llama().to("meta"))
    assert not can_pack(nn.Embedding(3, 4))


def test_without_the_operators_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise AttributeError("no such operator")

    weights._can_multiply.cache_clear()
    monkeypatch.setattr(weights, "_reorder", missing)
    assert not can_pack(tiny_llama())
    weights._can_multiply.cache_clear()


def test_bfloat16_needs_float32_weights_and_a_processor_that_computes_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for is_native in (False, True):
        monkeypatch.setattr(weights, "computes_bfloat16", lambda is_native=is_native: is_native)
        assert allows_form(nn.Linear(8, 8), "bfloat16") == (is_native and REORDERS_BF16)
        assert not allows_form(nn.Linear(8, 8).half(), "bfloat16")
        assert not allows_form(nn.Linear(8, 8, device="meta"), "bfloat16")


class _OtherLinear(nn.Linear):
    """A stand-in for a quantized layer."""


class _OtherTensor(torch.Tensor):
    """A stand-in for a weight in another library's format."""


def test_layers_and_weights_of_other_kinds_have_only_their_own_form() -> None:
    other = torch.randn(8, 8).as_subclass(_OtherTensor)
    for source in (_OtherLinear(8, 8), nn.Embedding(8, 8), other, nn.Parameter(other)):
        assert [form for form in WEIGHT_FORMS if allows_form(source, form)] == ["own"]


def _doubled(weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return 2 * weight.detach() if bias is None else 2 * (weight + bias[:, None]).detach()


@torch.no_grad()
def test_a_copy_follows_changes_in_place_and_replaced_tensors() -> None:
    layer = nn.Linear(3, 4)
    copy = WeightCopy(layer, _doubled)
    assert copy.current() is copy.current()
    for change in (
        lambda: layer.weight.mul_(3),
        lambda: layer.bias.add_(1),
        lambda: setattr(layer, "weight", nn.Parameter(torch.randn(4, 3))),
        lambda: setattr(layer, "bias", None),
        lambda: layer.to(torch.bfloat16),
    ):
        change()
        assert torch.equal(copy.current(), _doubled(layer.weight, layer.bias))
    stack = nn.Parameter(torch.randn(2, 3, 4))
    copy = WeightCopy(stack, _doubled)
    assert torch.equal(copy.current(), 2 * stack)
    stack.zero_()
    assert not copy.current().any()
    with torch.inference_mode():
        version_of(torch.zeros(3))  # tensors made in this mode have no counter


def test_copies_of_the_same_source_by_the_same_function_are_shared() -> None:
    layer, other = nn.Linear(3, 4), nn.Linear(3, 4)
    copy = WeightCopy.shared(layer, _doubled)
    assert WeightCopy.shared(layer, _doubled) is copy
    assert WeightCopy.shared(other, _doubled) is not copy
    assert WeightCopy.shared(layer, version_of) is not copy
    assert deepcopy(copy, {id(layer): layer}) is copy
    of_a_copy = deepcopy(copy)
    assert of_a_copy is WeightCopy.shared(of_a_copy.source, _doubled) is not copy


def _resident() -> int:
    """Return the bytes of files in this process' memory."""
    status = Path("/proc/self/status").read_text()
    match = re.search(r"RssFile:\s+(\d+) kB", status)
    assert match is not None
    return 1024 * int(match[1])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is mapped")
@pytest.mark.parametrize("changes", [False, True])
def test_only_unchanged_memory_is_given_back(changes: bool, tmp_path: Path) -> None:
    file, size = tmp_path / "weights.safetensors", 8 << 20
    save_file({"weight": torch.arange(size // 4, dtype=torch.float32)}, file)
    weight = load_file(file)["weight"]
    expected = weight.clone()
    if changes:
        weight[7] = expected[7] = -1.0
    before = _resident()
    MappedMemory().give_back(weight)
    gave_back = before - _resident() > size // 2
    assert gave_back is not changes
    assert torch.equal(weight, expected)
