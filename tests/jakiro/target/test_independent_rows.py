"""Parts of a batch-invariant target give the same bits for a token, whatever is beside it."""

from typing import Any

import pytest
import torch
from helpers.families import tiny_family
from helpers.products import with_products, with_uneven_experts
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.llama4.modeling_llama4 import Llama4Router

from jakiro.errors import TargetNotSupported
from jakiro.target import independent_rows
from jakiro.target.adapter import TargetAdapter
from jakiro.target.batch_invariance import check_batch_invariance
from jakiro.target.independent_rows import DoubleLinear, with_independent_rows

BF16 = torch.bfloat16
WITH_EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3")


def _alone(part: Any, rows: Tensor) -> list[Tensor]:
    """Return the results of rows, computed in pairs."""
    results = [part(pair) for pair in rows.split(2)]
    parts = zip(*results, strict=True) if isinstance(results[0], tuple) else [results]
    return [torch.cat(list(own)) for own in parts]


@pytest.mark.parametrize("shape", [(1, 2048), (1, 4096), (61, 32)])
def test_products_of_few_weights_do_not_depend_on_the_number_of_rows(
    shape: tuple[int, int],
) -> None:
    layer = nn.Linear(shape[1], shape[0]).to(BF16)
    replaced = with_independent_rows(layer, BF16)
    assert isinstance(replaced, DoubleLinear)
    rows = torch.randn(4096, shape[1]).to(BF16)
    with torch.no_grad():
        assert torch.equal(_alone(replaced, rows)[0], replaced(rows))
        torch.testing.assert_close(replaced(rows), layer(rows), rtol=0.02, atol=0.02)


def test_routers_in_float32_do_not_depend_on_the_number_of_rows() -> None:
    config = tiny_family(
        "deepseek_v3", hidden_size=512, n_routed_experts=6, num_experts_per_tok=2
    ).config
    router = DeepseekV3TopkRouter(config).to(BF16)
    nn.init.normal_(router.weight, std=0.02)
    rows = torch.randn(200, 512).to(BF16)
    with torch.no_grad():
        expected = router(rows)
        router = with_independent_rows(router, BF16)
        got = router(rows)
        for own, other, before in zip(_alone(router, rows), got, expected, strict=True):
            assert torch.equal(own, other)
            assert own.dtype == before.dtype
    torch.testing.assert_close(got[0], expected[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "relu2"])
def test_activations_do_not_depend_on_the_position_in_a_tensor(
    name: str, dtype: torch.dtype
) -> None:
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    numbers = numbers[numbers.isfinite()]
    function = ACT2FN[name]
    expected = function(numbers)
    replaced = with_independent_rows(nn.Sequential(function), dtype)
    got = replaced(numbers)
    single = replaced(numbers.repeat_interleave(2)[::2])
    assert torch.equal(got.nan_to_num(), single.nan_to_num())
    # The last numbers are those that may have been computed in another way.
    assert torch.equal(got[:-64].nan_to_num(), expected[:-64].nan_to_num())
    assert replaced(torch.ones(3)).dtype == torch.float32


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_experts_never_compute_a_single_token(family: str) -> None:
    target = TargetAdapter(with_uneven_experts(tiny_family(family, seed=1)))
    target.fuse(batch_invariant=True)
    check_batch_invariance(target)


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_the_check_notices_experts_that_compute_a_single_token(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(independent_rows, "has_experts", lambda module: False)
    target = TargetAdapter(with_uneven_experts(tiny_family(family, seed=1)))
    target.fuse(batch_invariant=True)
    with pytest.raises(TargetNotSupported, match=r"products of layers.\d.mlp.experts"):
        check_batch_invariance(target)


def test_routers_that_are_linear_layers_are_checked() -> None:
    target = TargetAdapter(with_products(tiny_family("llama4")))
    assert any(isinstance(part, Llama4Router) for part in target.model.modules())
    target.fuse(batch_invariant=True)
    check_batch_invariance(target)
