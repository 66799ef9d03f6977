"""A model stays unchanged while copies of its modules compute in other ways."""

import pytest
import torch
from helpers.models import tiny_llama
from torch import nn

from inference import SpeculativeDecoder
from jakiro.errors import TargetNotSupported
from jakiro.target.adapter import TargetAdapter
from jakiro.target.step import chain_step

BF16 = torch.bfloat16


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_model_itself_stays_as_it_is(batch_invariant: bool) -> None:
    model = tiny_llama().to(BF16)
    modules = {name: type(module) for name, module in model.named_modules()}
    weights = {name: weight.clone() for name, weight in model.named_parameters()}
    target = TargetAdapter(model)
    target.fuse(batch_invariant=batch_invariant)
    assert target.modules.is_batch_invariant == batch_invariant
    assert target.modules.num_fused == 3
    assert model.config._attn_implementation == "sdpa"
    assert {name: type(module) for name, module in model.named_modules()} == modules
    for name, weight in model.named_parameters():
        assert torch.equal(weight, weights[name])


@pytest.mark.parametrize(
    "change", [{"attn_implementation": "flex_attention"}, {"device": "meta"}], ids=str
)
def test_what_cannot_be_batch_invariant_is_refused(change: dict[str, str]) -> None:
    model = tiny_llama()
    target = TargetAdapter(model)
    if "device" in change:
        model.to("meta")
    else:
        model.config._attn_implementation = change["attn_implementation"]
    with pytest.raises(TargetNotSupported, match="cannot be made batch-invariant"):
        target.fuse(batch_invariant=True)


@pytest.mark.parametrize("change", ["replaced", "in place"])
def test_copies_follow_weights_that_change(change: str) -> None:
    model = tiny_llama()
    decoder = SpeculativeDecoder(model)
    before = decoder.generate([1, 2, 3], max_new_tokens=20).new_token_ids
    copy = decoder.target.modules.layers
    layer = model.model.layers[0].mlp.up_proj
    if change == "replaced":
        layer.weight = nn.Parameter(torch.randn_like(layer.weight))
    else:
        with torch.no_grad():
            layer.weight.mul_(-3.0)
    expected = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=20)[0, 3:].tolist()
    assert expected != before
    assert decoder.generate([1, 2, 3], max_new_tokens=20).new_token_ids == expected
    assert decoder.target.modules.layers is not copy


def test_all_adapters_of_a_model_share_its_copies() -> None:
    model = tiny_llama()
    one, other = TargetAdapter(model), TargetAdapter(model)
    one.fuse()
    other.fuse()
    assert one.modules.layers is other.modules.layers is not model.model
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        features = other.forward(chain_step(ids, 0), other.new_cache(1, 12)).features
    torch.testing.assert_close(features, model.model(input_ids=ids).last_hidden_state)
