"""Batch-invariant targets: the bits of a token do not depend on what else is in its batch."""

from typing import Any

import pytest
import torch
from helpers.families import FAMILIES, MECHANISMS, tiny_family
from helpers.models import tiny_drafter, tiny_llama
from helpers.products import ExactLinear, with_products, with_uneven_experts
from helpers.quick import mostly_slow
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from inference import SpeculativeDecoder
from inference.drafters.lookup import LookupDrafter, LookupSettings
from inference.trees.shape import TreeShape
from jakiro.errors import TargetNotSupported
from jakiro.target import independent_rows
from jakiro.target.adapter import TargetAdapter
from jakiro.target.batch_invariance import check_batch_invariance
from jakiro.target.independent_rows import (
    BATCH_INVARIANT,
    DoubleLinear,
    batch_invariant_attention,
    with_independent_rows,
)

BF16 = torch.bfloat16
WITH_EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3")
REFUSED = ("falcon", "gptj", "gpt_oss")  # see `test_equal_texts.py`


class _UnevenLinear(nn.Linear):
    """A product that is different if there are more than four rows."""

    def forward(self, x: Tensor) -> Tensor:
        product = super().forward(x)
        return product * 1.01 if x.numel() > 4 * x.shape[-1] else product


class _SingleRowLinear(ExactLinear):
    """A product that is different if there is a single row."""

    def forward(self, x: Tensor) -> Tensor:
        product = super().forward(x)
        return product * 1.01 if x.numel() == x.shape[-1] else product


def _bf16(model: PreTrainedModel, product: type[nn.Linear] = ExactLinear) -> TargetAdapter:
    return TargetAdapter(with_products(model, product))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in MECHANISMS else pytest.mark.slow)
        for name in FAMILIES
        if not name.startswith(REFUSED)
    ],
)
def test_tokens_of_a_family_have_the_same_bits_in_every_step(name: str) -> None:
    # With the seed 0, rounding chooses other experts of Mixtral in the adapter than in the model.
    target = _bf16(tiny_family(name, seed=1))
    target.fuse(batch_invariant=True)
    check_batch_invariance(target)


def _two_heads() -> PreTrainedModel:
    return tiny_llama(vocab=61, hidden_size=128, num_attention_heads=2, num_key_value_heads=1)


def test_the_check_notices_attention_that_depends_on_other_tokens() -> None:
    def uneven(module: nn.Module, query: Tensor, *arguments: Any, **options: Any) -> Any:
        attended, _ = batch_invariant_attention(module, query, *arguments, **options)
        return (attended * 1.01 if query.shape[2] > 4 else attended), None

    target = _bf16(_two_heads())
    target.fuse(batch_invariant=True)
    check_batch_invariance(target)
    AttentionInterface.register(BATCH_INVARIANT, uneven)
    try:
        with pytest.raises(TargetNotSupported, match="read together"):
            check_batch_invariance(target)
    finally:
        AttentionInterface.register(BATCH_INVARIANT, batch_invariant_attention)


def test_the_check_notices_products_that_depend_on_other_tokens() -> None:
    target = _bf16(_two_heads(), _UnevenLinear)
    target.fuse(batch_invariant=True)
    with pytest.raises(TargetNotSupported, match=r"products of layers.0.self_attn.q_proj with 3"):
        check_batch_invariance(target)


def test_products_of_a_single_row_are_never_needed() -> None:
    target = _bf16(_two_heads(), _SingleRowLinear)
    target.fuse(batch_invariant=True)
    check_batch_invariance(target)
    exact = SpeculativeDecoder(_bf16(_two_heads()).model, batch_invariant=True)
    decoder = SpeculativeDecoder(target.model, batch_invariant=True)
    for prompt in ([5], [1, 2, 3]):
        got = decoder.generate(prompt, max_new_tokens=20)
        assert got.new_token_ids == exact.generate(prompt, max_new_tokens=20).new_token_ids


@pytest.mark.parametrize("drafter", mostly_slow(["trained", "sampled", "lookup"], quick=["lookup"]))
def test_drafts_other_sequences_and_chunks_change_no_greedy_token(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _bf16(tiny_llama(vocab=61, initializer_range=0.05)).model
    alone = SpeculativeDecoder(model, batch_invariant=True)
    prompts = [[1, 2, 3, 1, 2], [4, 5, 6, 7, 8, 9, 10], [3], [9, 9, 1, 2, 3, 4, 9, 9, 1]]
    expected = [alone.generate(prompt, max_new_tokens=20).new_token_ids for prompt in prompts]
    tree: Any = TreeShape(children=4, breadth=3, num_nodes=12, sampled=drafter == "sampled")
    used: Any = tiny_drafter(TargetAdapter(model))
    if drafter == "lookup":
        used, tree = LookupDrafter(LookupSettings(num_nodes=12, depth=5)), "fixed"
    decoder = SpeculativeDecoder(model, used, tree=tree, batch_invariant=True)
    outputs = [decoder.generate(prompt, max_new_tokens=20) for prompt in prompts]
    assert [output.new_token_ids for output in outputs] == expected
    assert sum(output.stats.accepted.total() for output in outputs) > 0
    together = decoder.generate_batch(prompts, max_new_tokens=20)
    assert [output.new_token_ids for output in together] == expected
    assert _admitted(decoder, prompts) == expected
    monkeypatch.setattr("inference.engine.context.PREFILL_CHUNK", 2)
    outputs = [decoder.generate(prompt, max_new_tokens=20) for prompt in prompts]
    assert [output.new_token_ids for output in outputs] == expected
    # In the last chunk, the longest prompt has a single token, and the others have none.
    together = decoder.generate_batch(prompts, max_new_tokens=20)
    assert [output.new_token_ids for output in together] == expected
    assert _admitted(decoder, prompts) == expected


def _admitted(decoder: SpeculativeDecoder, prompts: list[list[int]]) -> list[list[int]]:
    """Return the new tokens of prompts, all but the first of which join a running batch."""
    run = decoder.start(prompts[:1], max_new_tokens=20)
    for number, _ in enumerate(run):
        if number == 2:
            decoder.admit(run, prompts[1:], max_new_tokens=20)
    return [state.new_token_ids for state in run.sequences]


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
    rows = torch.randn(512, shape[1]).to(BF16)
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
