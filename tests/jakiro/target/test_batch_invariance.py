"""Batch-invariant targets: the bits of a token do not depend on what else is in its batch."""

from typing import Any

import pytest
import torch
from helpers.families import FAMILIES, MECHANISMS, tiny_family
from helpers.models import tiny_drafter, tiny_llama
from helpers.products import ExactLinear, with_products
from helpers.quick import mostly_slow
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from inference import SpeculativeDecoder
from inference.drafters.lookup import LookupDrafter, LookupSettings
from inference.trees.shape import TreeShape
from jakiro.errors import TargetNotSupported
from jakiro.target.adapter import TargetAdapter
from jakiro.target.attention import BATCH_INVARIANT, batch_invariant_attention
from jakiro.target.batch_invariance import check_batch_invariance

BF16 = torch.bfloat16
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


def test_a_replaced_weight_is_noticed_by_the_next_request() -> None:
    model = tiny_llama(vocab=61).to(BF16)
    decoder = SpeculativeDecoder(_bf16(model).model, batch_invariant=True)
    before = decoder.generate([1, 2, 3], max_new_tokens=12).new_token_ids
    other = tiny_llama(vocab=61, seed=5).to(BF16)
    model.load_state_dict(other.state_dict(), assign=True)
    after = decoder.generate([1, 2, 3], max_new_tokens=12).new_token_ids
    expected = SpeculativeDecoder(model, batch_invariant=True)
    assert after == expected.generate([1, 2, 3], max_new_tokens=12).new_token_ids
    assert after != before


@pytest.mark.parametrize(
    "drafter", mostly_slow(["trained", "sampled", "lookup"], quick=["trained", "lookup"])
)
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
