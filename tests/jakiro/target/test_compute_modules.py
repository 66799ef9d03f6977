"""A model stays unchanged while copies of its modules compute in other ways."""

import pytest
import torch
from helpers.models import tiny_llama
from torch import nn

from jakiro.errors import TargetNotSupported
from jakiro.target.adapter import TargetAdapter
from jakiro.target.packed_linear import can_pack

BF16 = torch.bfloat16


def test_the_model_itself_stays_as_it_is() -> None:
    model = tiny_llama().to(BF16)
    target = TargetAdapter(model)
    target.make_batch_invariant()
    assert model.config._attn_implementation == "sdpa"
    assert target.modules.form == "own weights, batch-invariant"
    if can_pack(model):  # depends on the processor
        target.modules.pack()
        assert target.modules.form == "reordered weights for trees, batch-invariant"
        target.modules.unpack()
    assert target.modules.is_batch_invariant
    own = {id(weight) for weight in model.parameters()}
    assert {id(weight) for weight in target.modules.layers.parameters()} < own


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
        target.make_batch_invariant()


def test_copies_follow_parameters_that_are_replaced() -> None:
    model = tiny_llama()
    target = TargetAdapter(model)
    target.modules.pack()
    copy = target.modules.layers
    target.modules.follow_changes()
    assert target.modules.layers is copy
    norm = model.model.norm
    norm.weight = nn.Parameter(2 * norm.weight.detach())
    target.modules.follow_changes()
    assert target.modules.is_packed
    assert target.modules.layers.norm.weight is norm.weight
