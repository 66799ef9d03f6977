"""Decoder layers of few operators, in place of Hugging Face's, for the short steps of decoding.

A step over a few tokens takes little longer than reading the weights, so every small operator
counts. `fuse_layers` gives the layers of a copied decoder another `forward`, in which matrices with
the same input are one product, and queries and keys are normalized and rotated together. Model
families differ in details that neither configs nor names tell, so each kind of layer is tried
against the original first; a kind that differs keeps its own `forward`.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import layer_norm, rms_norm
from torch.utils._pytree import tree_map_only
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from jakiro.target.attention_shape import HeadShape
from jakiro.target.cache import SlotCache
from jakiro.target.packed_linear import PackedLinear
from jakiro.target.step import StepInput, chain_step

States = Float[Tensor, "batch queries hidden"]
Heads = Float[Tensor, "batch queries heads dim"]
Angles = Float[Tensor, "batch queries dim"]
# Function from the weight and the bias of a linear layer to a module that computes the layer.
MakeProduct = Callable[[Tensor, Tensor | None], nn.Module]
Norm = Callable[[Tensor], Tensor]

# Which numbers of a query or a key are rotated together: those of the first half with those of the
# second, or neighbours. Angles are given for each number, or once for both; for neighbours, the
# second half of the given angles then repeats the first. Layers without positions have none.
Rotation = Literal["halves", "halves, once", "neighbours", "neighbours, once", "none"]
ROTATIONS: tuple[Rotation, ...] = get_args(Rotation)
TOLERANCE = 1e-4  # largest difference in float32, in proportion to the largest number

NORMS = (
    "input_layernorm",
    "post_attention_layernorm",  # behind attention, or before the feed-forward part
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "post_self_attn_layernorm",
    "post_mlp_layernorm",
)
# Alternative names of parts that belong together.
QUERY_KEY_VALUE = (("qkv_proj",), ("q_proj", "k_proj", "v_proj"))
NORMS_OF_HEADS = (("q_norm", "k_norm"), ("query_layernorm", "key_layernorm"))
GATE_UP = (("gate_up_proj",), ("gate_proj", "up_proj"))


class Design(NamedTuple):
    """What the names of a layer's parts do not tell, and is found by trial."""

    rotation: Rotation
    rotates_first: bool  # whether queries and keys are rotated before they are normalized


class Trial(NamedTuple):
    """What trials need of the target whose layers are fused.

    Attributes:
        run: function that runs a copied decoder over a step, with a number of visible slots.
    """

    shapes: tuple[HeadShape, ...]
    max_position: int
    run: Callable[[nn.Module, StepInput, SlotCache, int], Tensor]

    def are_equal(self, one: nn.Module, other: nn.Module) -> bool:
        """Return whether two decoders have the same features, up to the rounding of many layers."""
        weight = next(other.parameters())
        features = []
        with torch.inference_mode():
            for decoder in (one, other):
                step = chain_step(torch.arange(5, device=weight.device)[None] % 2, 0)
                cache = SlotCache(self.shapes, 1, 16, weight.dtype, weight.device)
                cache.set_slots(step.slots, cache.capacity)
                features.append(self.run(decoder, step, cache, cache.capacity))
        got, expected = (each.float() for each in features)
        # Each layer was compared in float32; half precision may round differently in every layer.
        bound = 1e-3 if weight.dtype == torch.float32 else 0.3
        return bool((got - expected).norm() <= bound * expected.norm())


class Unfusable(Exception):
    """A layer has a part that a fused layer does not compute."""


# What the code of an unknown family may raise in a trial; the layer then stays as it is.
FAILURES = (
    Unfusable,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class JoinedProduct(nn.Module):
    """Linear layers with the same input, as one product with a copy of their weights.

    Args:
        make: function that copies the weights; None to compute each layer as it is.
    """

    def __init__(self, layers: Sequence[nn.Module | None], make: MakeProduct | None) -> None:
        super().__init__()
        if any(type(layer) is not nn.Linear for layer in layers):
            raise Unfusable
        linears = cast(Sequence[nn.Linear], layers)
        self.sizes = [layer.out_features for layer in linears]
        self.layers = nn.ModuleList(linears if make is None else ())
        self.product: nn.Module | None = None
        if make is not None:
            weights = [layer.weight.detach() for layer in linears]
            weight = torch.cat(weights) if len(weights) > 1 else weights[0]
            self.product = make(weight, _joined_bias(linears))

    def forward(self, x: States, residual: States | None = None) -> Tensor:
        """Return the outputs of all layers, one after the other, plus another tensor."""
        if isinstance(self.product, PackedLinear):
            return self.product(x, residual)
        output = self.product(x) if self.product is not None else self._separately(x)
        return output if residual is None else residual + output

    def _separately(self, x: States) -> Tensor:
        outputs = [layer(x) for layer in self.layers]
        return torch.cat(outputs, dim=-1) if len(outputs) > 1 else outputs[0]


def _joined_bias(layers: Sequence[nn.Linear]) -> Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    zeros = (layer.weight.new_zeros(layer.out_features) for layer in layers)
    pairs = zip(layers, zeros, strict=True)
    return torch.cat([zero if layer.bias is None else layer.bias.detach() for layer, zero in pairs])


class FusedLayer(nn.Module):
    """A decoder layer with rotary attention and RMS or layer norms, of as few operators as can be.

    Args:
        layer: layer of a copied decoder, whose weights may be read but are not changed.
        make: see `JoinedProduct`.

    Raises:
        Unfusable: the layer has other parts.
    """

    def __init__(self, layer: nn.Module, make: MakeProduct | None, design: Design) -> None:
        super().__init__()
        attention, mlp = _part(layer, "self_attn"), _part(layer, "mlp")
        for name, child in layer.named_children():
            if name not in {"self_attn", "mlp", *NORMS} and list(child.parameters()):
                raise Unfusable
        self._attention = [attention]  # no submodule: attention functions read its attributes
        self._eager: Any = vars(sys.modules[type(attention).__module__])["eager_attention_forward"]
        self.design = design
        self.layer_idx = attention.layer_idx
        self.options = _attention_options(attention)
        self.residual_multiplier = float(getattr(layer, "residual_multiplier", 1.0))
        self._take_norms(layer)
        self._take_attention(attention, make)
        self._take_feed_forward(mlp, make)

    def _take_norms(self, layer: nn.Module) -> None:
        first, after, before_mlp, after_mlp, glm_after, glm_after_mlp = (
            getattr(layer, name, None) for name in NORMS
        )
        if glm_after is not None:
            after, before_mlp, after_mlp = glm_after, after, glm_after_mlp
        elif before_mlp is None and after_mlp is None:  # there is no norm behind attention
            after, before_mlp = None, after
        self.is_parallel = after is None and before_mlp is None
        self.first = _fast_norm(first)
        self.after, self.before_mlp = _fast_norm(after), _fast_norm(before_mlp)
        self.after_mlp = _fast_norm(after_mlp)

    def _take_attention(self, attention: Any, make: MakeProduct | None) -> None:
        self.dim = attention.head_dim
        output = _part(attention, "o_proj", "dense")
        self.qkv = JoinedProduct(_parts(attention, QUERY_KEY_VALUE), make)
        self.output = JoinedProduct([output], make)
        num_queries = output.in_features // self.dim
        num_keys = (sum(self.qkv.sizes) // self.dim - num_queries) // 2
        self.heads = [num_queries, num_keys, num_keys]
        norms = [norm for norm in _parts(attention, NORMS_OF_HEADS) if norm is not None]
        is_wide = any(norm.weight.numel() != self.dim for norm in norms)
        self.wide_norms = [_fast_norm(norm) for norm in norms if is_wide]
        self.head_norms = [_fast_norm(norm) for norm in norms if not is_wide]

    def _take_feed_forward(self, mlp: Any, make: MakeProduct | None) -> None:
        inputs, down = _parts(mlp, GATE_UP), getattr(mlp, "down_proj", None)
        self.mlp = None
        if not inputs or any(type(each) is not nn.Linear for each in (*inputs, down)):
            self.mlp = mlp  # such as experts
            return
        self.gate_up, self.down = JoinedProduct(inputs, make), JoinedProduct([down], make)
        self.activation = _part(mlp, "act_fn", "activation_fn")

    def forward(
        self,
        hidden_states: States,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        position_embeddings: tuple[Angles, Angles] | None = None,
        **_options: Any,
    ) -> States:
        """Return the layer's output, and store the keys and values of the queries."""
        x = hidden_states
        normalized = self.first(x)
        query, key, value = self._queries_keys_values(normalized, position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        (attention,) = self._attention
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            attention.config._attn_implementation, self._eager
        )
        attended, _ = attend(attention, query, key, value, attention_mask, **self.options)
        x = self._plus(x, self.output, attended.flatten(2), self.after)
        if not self.is_parallel:
            normalized = self.before_mlp(x)
        if self.mlp is not None:
            output = self.mlp(normalized)
            return self._add(x, self.after_mlp(output[0] if isinstance(output, tuple) else output))
        gate, up = self.gate_up(normalized).chunk(2, dim=-1)
        return self._plus(x, self.down, self.activation(gate) * up, self.after_mlp)

    def _queries_keys_values(
        self, x: States, angles: tuple[Angles, Angles] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        joined = self.qkv(x)
        if self.wide_norms:
            sizes = [count * self.dim for count in self.heads]
            query, key, value = joined.split(sizes, dim=-1)
            norms = self.wide_norms
            joined = torch.cat((norms[0](query), norms[1](key), value), dim=-1)
        heads = joined.unflatten(-1, (-1, self.dim))
        rotated, value = heads.split([sum(self.heads[:2]), self.heads[2]], dim=2)
        if not self.design.rotates_first:
            rotated = self._normalized(rotated)
        if self.design.rotation != "none" and angles is not None:
            rotated = _rotate(rotated, *_prepared(angles, self.design.rotation))
        if self.design.rotates_first:
            rotated = self._normalized(rotated)
        query, key = rotated.split(self.heads[:2], dim=2)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def _normalized(self, heads: Heads) -> Heads:
        if not self.head_norms:
            return heads
        query, key = heads.split(self.heads[:2], dim=2)
        return torch.cat((self.head_norms[0](query), self.head_norms[1](key)), dim=2)

    def _plus(self, x: States, product: JoinedProduct, inner: Tensor, norm: Norm) -> States:
        """Return a residual stream after the addition of a product, in one operator if possible."""
        if norm is _identity and self.residual_multiplier == 1:
            return product(inner, x)
        return self._add(x, norm(product(inner)))

    def _add(self, x: States, update: States) -> States:
        multiplier = self.residual_multiplier
        return x + update if multiplier == 1 else torch.add(x, update, alpha=multiplier)


def _part(owner: nn.Module, *names: str) -> Any:
    """Return the part with one of several names.

    Raises:
        Unfusable: there is none.
    """
    found = next((getattr(owner, name) for name in names if hasattr(owner, name)), None)
    if found is None:
        raise Unfusable
    return found


def _parts(owner: nn.Module, alternatives: Sequence[tuple[str, ...]]) -> list[Any]:
    """Return the parts with the first names that exist; an empty list if none do."""
    names = next((names for names in alternatives if hasattr(owner, names[0])), ())
    return [getattr(owner, name, None) for name in names]


def fuse_layers(decoder: nn.Module, trial: Trial, make: MakeProduct | None) -> int:
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
    calls = _observed(decoder, [alike[0] for alike in kinds.values()], trial)
    count = 0
    for alike in kinds.values():
        design = _design_of(alike[0], calls[alike[0]], trial.shapes)
        if design is None:
            continue
        for layer in alike:
            fused = FusedLayer(layer, make, design)
            layer._modules = {"fused": fused}
            layer.forward = fused.forward
        count += len(alike)
    return count


def _has_known_parts(layer: nn.Module) -> bool:
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


def _observed(
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
            cache = SlotCache(trial.shapes, 1, 16, weight.dtype, weight.device)
            cache.set_slots(step.slots, cache.capacity)
            trial.run(decoder, step, cache, cache.capacity)
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
    layer: nn.Module, calls: Sequence[_Call], shapes: tuple[HeadShape, ...]
) -> Design | None:
    """Return the design with which a fused layer equals a layer in float32, if there is one."""
    original = deepcopy(layer).float()
    with torch.no_grad():  # norms of a new model are all 1, for which any order is the same
        for weight in original.parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight), alpha=0.1)
    with torch.inference_mode():
        try:
            expected = _outputs(original, calls, shapes)
        except FAILURES:  # its outputs or arguments are none that a fused layer has
            return None
        for design in map(Design._make, product(ROTATIONS, (False, True))):
            try:
                fused = FusedLayer(original, None, design)
                got = _outputs(fused, calls, shapes)
            except FAILURES:
                continue
            if all(_are_close(*pair) for pair in zip(got, expected, strict=True)):
                return design
    return None


def _outputs(
    layer: nn.Module, calls: Sequence[_Call], shapes: tuple[HeadShape, ...]
) -> list[Tensor]:
    """Return the outputs of a layer, and the keys and values that it stored."""
    outputs: list[Tensor] = []
    cache = SlotCache(shapes, 1, 16, torch.float32, calls[0].hidden.device)
    for call in calls:
        cache.set_slots(call.step.slots, cache.capacity)
        caches = dict.fromkeys(call.caches, cache)
        output = layer(call.hidden, *call.more, **caches, **call.options)
        if not isinstance(output, Tensor):
            raise TypeError
        outputs.append(output)
    outputs += [part for each in cache.slot_layers for part in (each.keys, each.values)]
    return outputs


def _kind_of(layer: nn.Module) -> str:
    """Return a description of everything in a layer but its weights and its index."""
    parts: list[object] = [repr(layer)]
    for name, module in layer.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, (int, float, str, bool))}
        plain.pop("layer_idx", None)
        parts.append((name, sorted(plain.items())))
    return str(parts)


def _attention_options(attention: Any) -> dict[str, Any]:
    """Return the arguments with which a family calls its attention function."""
    options: dict[str, Any] = {"dropout": 0.0, "scaling": attention.scaling}
    if getattr(attention, "sliding_window", None) is not None:
        options["sliding_window"] = attention.sliding_window
    if getattr(attention, "attn_logit_softcapping", None) is not None:
        options["softcap"] = attention.attn_logit_softcapping
    if getattr(attention, "sinks", None) is not None:
        options["s_aux"] = attention.sinks
    return options


def _fast_norm(norm: nn.Module | None) -> Norm:
    """Return a norm as one operator, or the norm itself if no operator equals it."""
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    eps = next((getattr(norm, n) for n in ("variance_epsilon", "eps") if hasattr(norm, n)), None)
    if norm is None:
        return _identity
    if not isinstance(weight, Tensor) or weight.dim() != 1 or eps is None:
        return norm
    shape, own = (len(weight),), weight.detach().float()
    x = 3 * torch.randn(3, *shape, device=weight.device) + 1
    expected: Tensor = deepcopy(norm).float()(x)
    for scale in (own, 1 + own) if bias is None else ():
        if _are_close(rms_norm(x, shape, scale, eps), expected):
            rounded = scale.to(weight.dtype)
            if torch.equal(rounded.float(), scale):
                return partial(rms_norm, normalized_shape=shape, weight=rounded, eps=eps)
            return partial(_rms_norm_in_float32, weight=scale, eps=eps)
    shift = None if bias is None else bias.detach().float()
    if _are_close(layer_norm(x, shape, own, shift, eps), expected):
        shift = None if bias is None else bias.detach()
        return partial(
            layer_norm, normalized_shape=shape, weight=weight.detach(), bias=shift, eps=eps
        )
    return norm


def _rms_norm_in_float32(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def _identity(x: Tensor) -> Tensor:
    return x


def _prepared(angles: tuple[Angles, Angles], rotation: Rotation) -> tuple[Tensor, Tensor, Rotation]:
    """Return cosines, and sines with the sign of the number that they are multiplied by.

    All layers of a step share them.
    """
    cos, sin = angles
    owner, known = sin, getattr(sin, "_prepared", {})
    if rotation not in known:
        half = sin.shape[-1] // 2
        if rotation == "halves":
            signed = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        elif rotation == "halves, once":
            cos, signed = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        else:
            if rotation == "neighbours, once":
                cos, sin = (each[..., :half].repeat_interleave(2, dim=-1) for each in (cos, sin))
            signed = torch.stack((-sin[..., ::2], sin[..., 1::2]), dim=-1).flatten(-2)
        known[rotation] = cos.unsqueeze(2), signed.unsqueeze(2), rotation
        owner._prepared = known  # type: ignore[attr-defined]
    prepared: tuple[Tensor, Tensor, Rotation] = known[rotation]
    return prepared


def _rotate(x: Heads, cos: Tensor, signed_sin: Tensor, rotation: Rotation) -> Heads:
    dim = cos.shape[-1]
    if dim < x.shape[-1]:
        return torch.cat((_rotate(x[..., :dim], cos, signed_sin, rotation), x[..., dim:]), dim=-1)
    if rotation.startswith("halves"):
        first, second = x.chunk(2, dim=-1)
        other = torch.cat((second, first), dim=-1)
    else:
        other = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(x * cos, other, signed_sin).to(x.dtype)  # OLMo's angles are float32


def _in_float32(values: Any) -> Any:
    def converted(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.is_floating_point() else tensor

    return tree_map_only(Tensor, converted, values)


def _are_close(got: Tensor, expected: Tensor) -> bool:
    if got.shape != expected.shape:
        return False
    difference = (got.float() - expected.float()).abs().max()
    return bool(difference <= TOLERANCE * expected.abs().max().clamp(min=1e-6))
