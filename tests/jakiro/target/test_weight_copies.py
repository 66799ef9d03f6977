"""Copies of weights are made once, shared, and made again after a change."""

import gc
from copy import deepcopy

import torch
from torch import Tensor, nn

from jakiro.target.weight_copies import WeightCopy, version_of


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


@torch.no_grad()
def test_a_parameter_on_its_own_can_be_the_source() -> None:
    stack = nn.Parameter(torch.randn(2, 3, 4))
    copy = WeightCopy(stack, _doubled)
    assert torch.equal(copy.current(), 2 * stack)
    stack.zero_()
    assert not copy.current().any()


def test_copies_of_the_same_source_by_the_same_function_are_shared() -> None:
    layer, other = nn.Linear(3, 4), nn.Linear(3, 4)
    copy = WeightCopy.shared(layer, _doubled)
    assert WeightCopy.shared(layer, _doubled) is copy
    assert WeightCopy.shared(other, _doubled) is not copy
    assert WeightCopy.shared(layer, version_of) is not copy
    first = id(copy)
    del copy
    gc.collect()
    again = WeightCopy.shared(layer, _doubled)
    assert again._copy is None
    assert first


def test_versions_tell_tensors_and_changes_apart() -> None:
    one, other = torch.zeros(3), torch.zeros(3)
    before = version_of(one)
    assert version_of(one) == before != version_of(other)
    one.add_(1)
    assert version_of(one) != before
    with torch.inference_mode():
        version_of(torch.zeros(3))  # tensors made in this mode have no counter


def test_a_copied_model_has_the_copies_of_its_own_weights() -> None:
    layer = nn.Linear(4, 4)
    own = WeightCopy.shared(layer, _doubled)
    assert deepcopy(own, {id(layer): layer}) is own
    other = deepcopy(own)
    assert other is WeightCopy.shared(other.source, _doubled) is not own
