"""A copy of a decoder with fused layers, each of which is tried against the original first.

The trials see what decoding sees: a cache, a prompt, then a tree, at early and late positions. What
differs anywhere, or raises an error, stays as transformers computes it.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from jakiro.target.cache import SlotCache
from jakiro.target.fused_layer import (
    FAILURES,
    ROTATIONS,
    Design,
    FusedLayer,
    are_close,
)
from jakiro.target.step import StepInput, chain_step
from jakiro.target.weights import MakeProduct, is_altered


class Trial(NamedTuple):
    """What trials need of the target whose layers are fused.

    Attributes:
        new_cache: function that returns an empty cache with the dtype and device of a tensor.
        run: function that runs a copied decoder over a step, with a number of visible slots.
    """

    new_cache: Callable[[Tensor], SlotCache]
    max_position: int
    run: Callable[[nn.Module, StepInput, SlotCache, int], Tensor]

    def run_step(self, decoder: nn.Module, step: StepInput, weight: Tensor) -> Tensor:
        cache = self.new_cache(weight)
        cache.set_slots(step.slots, cache.capacity)
        return self.run(decoder, step, cache, cache.capacity)

    def features(self, decoder: nn.Module, like: Tensor) -> Tensor:
        """Return the features of a short text; `like` has the dtype and device of the weights."""
        step = chain_step(torch.arange(5, device=like.device)[None] % 2, 0)
        with torch.inference_mode():
            return self.run_step(decoder, step, like)


def are_alike(got: Tensor, expected: Tensor) -> bool:
    """Return whether the features of two decoders are the same up to the rounding of many layers.

    Each layer was compared in float32; half precision may round differently in every layer.
    """
    bound = 1e-3 if expected.dtype == torch.float32 else 0.3
    got, expected = got.float(), expected.float()
    return bool((got - expected).norm() <= bound * expected.norm())


def fuse_decoder(decoder: nn.Module, trial: Trial, make: MakeProduct | None) -> int:
    """Fuse the layers of a copied decoder that allow it, and return their number.

    A layer keeps its object, because transformers collects hidden states by its class; only its
    `forward` and its submodules are replaced.
    """
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return 0
    kinds: dict[str, list[nn.Module]] = {}
    for layer in filter(_has_known_parts, layers):
        kinds.setdefault(_kind_of(layer), []).append(layer)
    if not kinds:
        return 0
    calls = _observe(decoder, [alike[0] for alike in kinds.values()], trial)
    count = 0
    for alike in kinds.values():
        design = _design_of(alike[0], calls[alike[0]], trial.new_cache)
        if design is None:
            continue
        for layer in alike:
            fused = FusedLayer(layer, make, design)
            layer._modules = {"fused": fused}
            layer.forward = fused.forward
        count += len(alike)
    if count == len(layers) and "forward" not in vars(decoder):
        _fuse_frame(decoder, trial)
    return count


def _has_known_parts(layer: nn.Module) -> bool:
    if any(map(is_altered, layer.modules())):
        return False
    try:
        FusedLayer(layer, None, Design("none", False))
    except FAILURES:
        return False
    return True


class _Call(NamedTuple):
    """Arguments of a layer in a step, in float32; the hidden states are random."""

    step: StepInput
    hidden: Tensor
    more: tuple[Any, ...]
    options: dict[str, Any]
    caches: list[str]  # names of the arguments that are the cache


def _observe(
    decoder: nn.Module, layers: Sequence[nn.Module], trial: Trial
) -> dict[nn.Module, list[_Call]]:
    """Return the arguments of layers in steps like those of decoding.

    The steps read a prompt, then a tree below it, near the first and the last position and between.
    """
    weight = next(layers[0].parameters())
    calls: dict[nn.Module, list[_Call]] = {layer: [] for layer in layers}

    def observe(layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        given: Tensor = args[0] if args else options["hidden_states"]
        hidden = torch.randn(given.shape, generator=torch.Generator().manual_seed(0))
        caches = [name for name, value in options.items() if isinstance(value, SlotCache)]
        others = {name: options[name] for name in options.keys() - {*caches, "hidden_states"}}
        more, others = _in_float32((args[1:], others))
        calls[layer].append(_Call(step, hidden.to(given.device), more, others, caches))

    hooks = [layer.register_forward_pre_hook(observe, with_kwargs=True) for layer in layers]
    with torch.inference_mode():
        for step in _trial_steps(trial.max_position, weight.device):
            trial.run_step(decoder, step, weight)
    for hook in hooks:
        hook.remove()
    return calls


def _trial_steps(max_position: int, device: torch.device) -> Iterator[StepInput]:
    for first in sorted({0, min(17, max_position // 4), max_position // 2, max_position - 9}):
        prompt = chain_step(torch.arange(5, device=device)[None] % 2, 0)
        positions = prompt.positions + first
        yield replace(prompt, positions=positions)
        slots = prompt.slots[:, :4] + 5
        yield StepInput(
            token_ids=slots % 2,
            positions=positions[:, -1:] + slots.new_tensor([[1, 2, 2, 3]]),
            slots=slots,
            lengths=slots.new_tensor([5]),
            highest_slot=8,
            parents=slots.new_tensor([[-1, 0, 0, 1]]),
            max_depth=3,
        )


def _design_of(
    layer: nn.Module, calls: Sequence[_Call], new_cache: Callable[[Tensor], SlotCache]
) -> Design | None:
    """Return the design with which a fused layer equals a layer in float32, if there is one."""
    original = deepcopy(layer).float()
    with torch.no_grad():  # norms of a new model are all 1, for which any order is the same
        for weight in original.parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight), alpha=0.1)
    with torch.inference_mode():
        try:
            expected = _outputs(original, calls, new_cache)
        except FAILURES:  # its outputs or arguments are none that a fused layer has
            return None
        for design in map(Design._make, product(ROTATIONS, (False, True))):
            try:
                fused = FusedLayer(original, None, design)
                got = _outputs(fused, calls, new_cache)
            except FAILURES:
                continue
            if all(are_close(*pair) for pair in zip(got, expected, strict=True)):
                return design
    return None


def _outputs(
    layer: nn.Module, calls: Sequence[_Call], new_cache: Callable[[Tensor], SlotCache]
) -> list[Tensor]:
    outputs: list[Tensor] = []
    cache = new_cache(calls[0].hidden)
    for call in calls:
        cache.set_slots(call.step.slots, cache.capacity)
        caches = dict.fromkeys(call.caches, cache)
        output = layer(call.hidden, *call.more, **caches, **call.options)
        if not isinstance(output, Tensor):
            raise TypeError
        outputs.append(output)
    outputs += [part for slots in cache.slot_layers for part in (slots.keys, slots.values)]
    return outputs


def _kind_of(layer: nn.Module) -> str:
    """Return a description of everything in a layer but its weights and its index."""
    parts: list[object] = [repr(layer)]
    for name, module in layer.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, (int, float, str, bool))}
        plain.pop("layer_idx", None)
        parts.append((name, sorted(plain.items())))
    return str(parts)


class _Output(NamedTuple):
    last_hidden_state: Tensor
    hidden_states: tuple[Tensor, ...] | None


class _Frame:
    """What a decoder does around its fused layers, without transformers' code."""

    def __init__(self, decoder: Any) -> None:
        # Not the decoder itself, which refers to its frame: both are freed with the last reference.
        self._embed, self._rotate = decoder.embed_tokens, decoder.rotary_emb
        self._layers = [layer.forward for layer in decoder.layers]
        self._norm = decoder.norm

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor,
        past_key_values: SlotCache,
        output_hidden_states: bool,
        use_cache: bool = True,
    ) -> _Output:
        x = self._embed(input_ids)
        angles = self._rotate(x, position_ids)
        states = [x]
        for layer in self._layers:
            x = layer(x, attention_mask, position_ids, past_key_values, angles)
            states.append(x)
        states[-1] = x = self._norm(x)
        return _Output(x, tuple(states) if output_hidden_states else None)


def _fuse_frame(decoder: nn.Module, trial: Trial) -> None:
    """Leave out the code of transformers around the layers if all outputs are the same bits."""
    weight = next(decoder.parameters())
    forward, is_equal = decoder.forward, True

    def both(**arguments: Any) -> Any:
        nonlocal is_equal
        arguments["output_hidden_states"] = True
        output, got = forward(**arguments), frame(**arguments)
        pairs = zip(output.hidden_states, got.hidden_states or (), strict=True)
        is_equal = is_equal and all(torch.equal(*pair) for pair in pairs)
        return output

    try:
        frame = _Frame(decoder)
        decoder.forward = both
        with torch.inference_mode():
            # The last positions suffice: the frame has no numbers of its own.
            for step in list(_trial_steps(trial.max_position, weight.device))[-2:]:
                trial.run_step(decoder, step, weight)
    except FAILURES:
        is_equal = False
    vars(decoder).pop("forward", None)
    if is_equal:
        decoder.forward = frame


def _in_float32(values: Any) -> Any:
    return tree_map_only(
        Tensor, lambda part: part.float() if part.is_floating_point() else part, values
    )
