"""Copies of drafters whose layers compute with weights in another format."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from jakiro.drafter import JakiroDrafter
from jakiro.experts import MixtureOfExperts
from jakiro.target.compute_modules import sharing_copy
from jakiro.target.ends import TargetEnds
from jakiro.target.weights import (
    CONVERT,
    Product,
    WeightCopy,
    WeightForm,
    allows_form,
    has_adapters,
)

# As few bytes as the weights have without being quantized, in the order of the processor.
FASTEST: tuple[WeightForm, ...] = ("bfloat16", "packed")
FEWEST_OUTPUTS = 16  # layers with fewer outputs, such as routers, keep their own format

Source = nn.Linear | nn.Parameter  # a linear layer, or a stack of the experts' matrices


class ConvertedLinear(nn.Module):
    """Computes a linear layer with a copy of its weight in another format.

    The copy is made again if the weight or the bias is replaced or changed in place. The result has
    the dtype of the input, and no gradient.
    """

    def __init__(self, layer: nn.Linear, form: WeightForm) -> None:
        super().__init__()
        self.layer = layer
        self._product = WeightCopy.shared(layer, CONVERT[form])

    @property
    def weight(self) -> Tensor:
        """The layer's own weight, shape [out_features, in_features]."""
        return self.layer.weight

    @property
    def bias(self) -> Tensor | None:
        """The layer's own bias, shape [out_features]; None if there is none."""
        return self.layer.bias

    def forward(
        self, x: Float[Tensor, "*batch in_features"]
    ) -> Float[Tensor, "*batch out_features"]:
        """Return the product with the weight, plus the bias."""
        return self._product.current()(x).to(x.dtype)


class ConvertedStack(nn.Module):
    """Computes `jakiro.experts.expert_products` with copies of the matrices in another format.

    The copies are made again if the stack is changed in place. The result has the dtype of the
    input, and no gradient.
    """

    def __init__(
        self, stack: Float[nn.Parameter, "*levels experts width hidden"], form: WeightForm
    ) -> None:
        super().__init__()
        self.stack = stack
        self._products = WeightCopy.shared(stack, _convert_stack(form))

    def forward(
        self, inner: Float[Tensor, "*batch experts width"]
    ) -> Float[Tensor, "*batch_levels experts hidden"]:
        """Return the product of each expert's activation with its matrix, for each level."""
        products = self._products.current()
        if len(products) == 1:
            joined = products[0](inner)
        else:
            experts = inner.unbind(-2)
            outputs = [
                product(experts[index % len(experts)].contiguous())
                for index, product in enumerate(products)
            ]
            joined = torch.stack(outputs, dim=-2)
        return joined.unflatten(-2, self.stack.shape[:-2]).to(inner.dtype)


@cache
def _convert_stack(form: WeightForm) -> Callable[[Tensor], list[Product]]:
    """Return a function from a stack to a function for each of its matrices, in this order."""

    def convert(stack: Tensor) -> list[Product]:
        matrices = stack.detach().flatten(0, -3)
        return [CONVERT[form](matrix.T, None) for matrix in matrices]

    return convert


def head_form(
    model: JakiroDrafter, target: TargetEnds, preferred: Sequence[WeightForm]
) -> WeightForm:
    """Return the first preferred format of the draft head that is possible on this machine."""
    return _first_allowed([target.head if model.own_head is None else model.own_head], preferred)


def layer_form(model: JakiroDrafter, preferred: Sequence[WeightForm]) -> WeightForm:
    """Return the first preferred format of a drafter's layers that is possible on this machine.

    Compiled drafters and those with PEFT adapters have only their own format.
    """
    layers = sources(model)
    if model._compiled_call_impl is not None or has_adapters(model) or not layers:
        return "own"
    return _first_allowed(layers, preferred)


def _first_allowed(
    layers: Sequence[nn.Module | Tensor], preferred: Sequence[WeightForm]
) -> WeightForm:
    allowed = (form for form in preferred if all(allows_form(layer, form) for layer in layers))
    return next(allowed, "own")


def sources(model: JakiroDrafter) -> list[Source]:
    """Return the linear layers and stacks of a drafter whose format can be chosen.

    The drafter's own head is not among them, because it has a format of its own. Small layers, the
    stacks of experts of which only some are active, and matrices outside of both stay as they are.
    """
    layers: list[Source] = [
        module
        for module in model.modules()
        if type(module) is nn.Linear
        and module is not model.own_head
        and module.out_features >= FEWEST_OUTPUTS
    ]
    return [*layers, *(stack for _, _, stack in _stacks(model))]


def with_layers(model: JakiroDrafter, form: WeightForm) -> JakiroDrafter:
    """Return a drafter that shares all tensors, and computes with layers in a given format."""
    if form == "own":
        return model
    copied = cast(JakiroDrafter, sharing_copy(model))
    layers = {id(source) for source in sources(copied) if isinstance(source, nn.Linear)}
    for owner, name, stack in _stacks(copied):
        delattr(owner, name)  # a module cannot be assigned to the name of a parameter
        setattr(owner, name, ConvertedStack(stack, form))
    for module in list(copied.modules()):
        for name, child in module.named_children():
            if id(child) in layers:
                setattr(module, name, ConvertedLinear(cast(nn.Linear, child), form))
    return copied


def _stacks(model: nn.Module) -> list[tuple[MixtureOfExperts, str, nn.Parameter]]:
    """Return the stacks of experts that are all active, each with its owner and its name."""
    owners = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    return [
        (owner, name, stack)
        for owner in owners
        for name in ("down", "level_down")
        if not owner.is_sparse and isinstance(stack := getattr(owner, name), nn.Parameter)
    ]
