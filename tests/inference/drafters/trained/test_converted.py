"""Copies of a drafter compute with other formats of its weights, and the drafter stays as it is."""

import peft
import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.variants import VARIANTS
from torch import nn

from inference.drafters.trained.converted import (
    FEWEST_OUTPUTS,
    ConvertedLinear,
    ConvertedStack,
    layer_form,
    sources,
    with_layers,
)
from jakiro.drafter import JakiroDrafter
from jakiro.experts import MixtureOfExperts, expert_products
from jakiro.target.adapter import TargetAdapter
from jakiro.target.weights import WEIGHT_FORMS, WeightForm, allows_form


def _drafter(name: str = "E2-mixture-P2") -> JakiroDrafter:
    return tiny_drafter(TargetAdapter(tiny_llama()), VARIANTS[name])


FORMS = [form for form in WEIGHT_FORMS[1:] if layer_form(_drafter(), [form]) == form]
BOUNDS = {"packed": 1e-5, "bfloat16": 0.05, "int8": 0.1}
pytestmark = pytest.mark.skipif(not FORMS, reason="torch has no other formats on this machine")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("has_bias", "shape"), [(False, (4,)), (True, (2, 3, 1))], ids=str)
@torch.inference_mode()
def test_products_are_close_to_those_of_the_layer(
    form: WeightForm, has_bias: bool, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        layer = nn.Linear(96, 48, bias=has_bias).to(dtype)
        if not allows_form(layer, form):
            continue
        x = torch.randn(*shape, 96, dtype=dtype)
        product = ConvertedLinear(layer, form)(x)
        assert product.dtype == dtype
        bound = max(BOUNDS[form], 0.0 if dtype == torch.float32 else 0.02)
        torch.testing.assert_close(product, layer(x), atol=bound, rtol=bound)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("stacked", "batch"), [((3,), (1, 4)), ((2, 3), ()), ((1, 1), (2,))], ids=str
)
@torch.inference_mode()
def test_stacks_multiply_each_expert_by_its_own_matrix(
    form: WeightForm, stacked: tuple[int, ...], batch: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    stack = nn.Parameter(torch.randn(*stacked, 64, 32) / 8)
    inner = torch.randn(*batch, stacked[-1], 64)
    product = expert_products(inner, ConvertedStack(stack, form))
    expected = expert_products(inner, stack)
    assert product.shape == (*batch, *stacked, 32)
    torch.testing.assert_close(product, expected, atol=BOUNDS[form], rtol=BOUNDS[form])


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_changed_weights_are_converted_again(form: WeightForm) -> None:
    layer, x = nn.Linear(64, 32), torch.randn(4, 64)
    stack, inner = nn.Parameter(torch.randn(2, 64, 32)), torch.randn(4, 2, 64)
    linear, products = ConvertedLinear(layer, form), ConvertedStack(stack, form)
    before = linear(x), products(inner)
    assert linear._product.current() is linear._product.current()
    layer.weight.mul_(2)
    layer.bias.mul_(2)
    stack.mul_(2)
    torch.testing.assert_close(linear(x), 2 * before[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(products(inner), 2 * before[1], atol=1e-4, rtol=1e-4)
    layer.bias.add_(8)
    torch.testing.assert_close(linear(x), 2 * before[0] + 8, atol=0.1, rtol=0.02)
    layer.weight = nn.Parameter(torch.zeros(32, 64))
    torch.testing.assert_close(linear(x), layer.bias.expand(4, -1), atol=0.1, rtol=0.02)


@pytest.mark.parametrize("form", FORMS)
def test_copies_share_converted_weights_and_leave_the_drafter_as_it_is(form: WeightForm) -> None:
    drafter = _drafter()
    before = {name: type(module) for name, module in drafter.named_modules()}
    one, other = with_layers(drafter, form), with_layers(drafter, form)
    assert {name: type(module) for name, module in drafter.named_modules()} == before
    own = {tensor.data_ptr() for tensor in drafter.parameters()}
    assert {tensor.data_ptr() for tensor in one.parameters()} == own
    assert one.dtype == drafter.dtype
    project, again = (each.trunk.self_attention.project for each in (one, other))
    assert isinstance(project, ConvertedLinear)
    assert project._product is again._product
    assert isinstance(one.experts.down, ConvertedStack)
    assert one.experts.down._products is other.experts.down._products
    assert with_layers(drafter, "own") is drafter


@pytest.mark.parametrize("name", ["E8-1-active", "hybrid-tail-1", "gumiho", "hidden-transfer"])
def test_all_layers_but_the_smallest_are_converted(name: str) -> None:
    drafter = _drafter(name)
    network = with_layers(drafter, FORMS[-1])
    several = sources(drafter)
    in_copies = [
        module.layer if isinstance(module, ConvertedLinear) else module.stack
        for module in network.modules()
        if isinstance(module, ConvertedLinear | ConvertedStack)
    ]
    assert {id(source) for source in in_copies} == {id(source) for source in several}
    own = {id(source) for source in [*several, drafter.own_head]}
    left = [module for module in network.modules() if type(module) is nn.Linear]
    assert all(layer.out_features < FEWEST_OUTPUTS for layer in left if id(layer) not in own)


def test_stacks_of_experts_that_run_for_some_vectors_keep_their_format() -> None:
    settings = tiny_settings(num_experts=4, active_experts=1)
    drafter = tiny_drafter(TargetAdapter(tiny_llama()), settings)
    experts = with_layers(drafter, FORMS[0]).experts
    assert isinstance(experts, MixtureOfExperts)
    assert experts.down is drafter.experts.down
    assert all(isinstance(source, nn.Linear) for source in sources(drafter))


def test_compiled_and_adapted_drafters_and_other_devices_have_only_their_own_format() -> None:
    drafter, adapted = _drafter(), _drafter()
    assert layer_form(_drafter().to("meta"), FORMS) == "own"
    drafter.compile(backend="eager")
    assert layer_form(drafter, FORMS) == "own"
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["gate_up"]), adapted)
    assert layer_form(adapted, FORMS) == "own"
