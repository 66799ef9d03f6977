"""A decoder layer of few operators, in place of Hugging Face's, for the short steps of decoding.

A step over a few tokens takes little longer than reading the weights, so every small operator
counts. In a fused layer, matrices with the same input are one product, and queries and keys are
normalized and rotated together. Families differ in details that neither configs nor names tell:
`jakiro.target.fused_decoder` tries each layer against the original.
"""

import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import layer_norm, rms_norm
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from jakiro.target.weights import MakeProduct
from moa.layers import rms_norm_on_cpu

States = Float[Tensor, "batch queries hidden"]
Heads = Float[Tensor, "batch queries heads dim"]
Angles = Float[Tensor, "batch queries dim"]
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


def join_products(layers: Sequence[nn.Module | None], make: MakeProduct | None) -> nn.Module:
    """Return linear layers with the same input as one module.

    The module returns the outputs of all layers, one after the other; its second argument is added
    to them.

    Args:
        make: function that copies the weights; None to compute each layer as it is.
    """
    if any(type(layer) is not nn.Linear for layer in layers):
        raise Unfusable
    linears = cast(Sequence[nn.Linear], layers)
    return _SeparateProducts(linears) if make is None else make(linears)


class _SeparateProducts(nn.Module):
    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: States, residual: States | None = None) -> Tensor:
        outputs = [layer(x) for layer in self.layers]
        output = torch.cat(outputs, dim=-1) if len(outputs) > 1 else outputs[0]
        return output if residual is None else residual + output


class FusedLayer(nn.Module):
    """A decoder layer with rotary attention and RMS or layer norms, of as few operators as can be.

    Args:
        layer: layer of a copied decoder, whose weights may be read but are not changed.
        make: see `join_products`.

    Raises:
        Unfusable: the layer has other parts.
    """

    def __init__(self, layer: nn.Module, make: MakeProduct | None, design: Design) -> None:
        super().__init__()
        attention, mlp = _part(layer, "self_attn"), _part(layer, "mlp")
        for name, child in layer.named_children():
            if name not in {"self_attn", "mlp", *NORMS} and list(child.parameters()):
                raise Unfusable
        self._attend = _attention_function(attention)
        self.design = design
        self.layer_idx = attention.layer_idx
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
        inputs = _parts(attention, QUERY_KEY_VALUE)
        self.qkv, self.output = join_products(inputs, make), join_products([output], make)
        num_queries = output.in_features // self.dim
        num_keys = (sum(layer.out_features for layer in inputs) // self.dim - num_queries) // 2
        self.heads = (num_queries, num_keys, num_keys)
        norms = [norm for norm in _parts(attention, NORMS_OF_HEADS) if norm is not None]
        is_wide = any(norm.weight.numel() != self.dim for norm in norms)
        self.wide_norms = [_fast_norm(norm) for norm in norms if is_wide]
        self.head_norms = [_fast_norm(norm) for norm in norms if not is_wide]

    def _take_feed_forward(self, mlp: Any, make: MakeProduct | None) -> None:
        inputs, down = _parts(mlp, GATE_UP), getattr(mlp, "down_proj", None)
        self.mlp = None
        if not inputs or any(type(layer) is not nn.Linear for layer in (*inputs, down)):
            self.mlp = mlp  # such as experts
            return
        self.gate_up, self.down = join_products(inputs, make), join_products([down], make)
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
        attended, _ = self._attend(query, key, value, attention_mask)
        x = self._plus(x, self.output, attended.flatten(2), self.after)
        if not self.is_parallel:
            normalized = self.before_mlp(x)
        if self.mlp is not None:
            output = self.mlp(normalized)
            return self._add(x, self.after_mlp(output[0] if isinstance(output, tuple) else output))
        gate, up = self.gate_up.forward(normalized).chunk(2, dim=-1)
        return self._plus(x, self.down, self.activation(gate) * up, self.after_mlp)

    def _queries_keys_values(
        self, x: States, angles: tuple[Angles, Angles] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        joined = self.qkv.forward(x)
        if self.wide_norms:
            sizes = [count * self.dim for count in self.heads]
            query, key, value = joined.split_with_sizes(sizes, -1)
            norms = self.wide_norms
            joined = torch.cat((norms[0](query), norms[1](key), value), dim=-1)
        heads = joined.view(*joined.shape[:2], -1, self.dim)
        num_queries, num_keys, num_values = self.heads
        rotated, value = heads.split_with_sizes((num_queries + num_keys, num_values), 2)
        if not self.design.rotates_first:
            rotated = self._normalized(rotated)
        if self.design.rotation != "none" and angles is not None:
            rotated = _rotate(rotated, *_prepare(angles, self.design.rotation))
        if self.design.rotates_first:
            rotated = self._normalized(rotated)
        query, key = rotated.split_with_sizes((num_queries, num_keys), 2)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def _normalized(self, heads: Heads) -> Heads:
        if not self.head_norms:
            return heads
        query, key = heads.split(self.heads[:2], dim=2)
        return torch.cat((self.head_norms[0](query), self.head_norms[1](key)), dim=2)

    def _plus(self, x: States, product: nn.Module, inner: Tensor, norm: Norm) -> States:
        """Return a residual stream after the addition of a product, in one operator if possible."""
        if norm is _identity and self.residual_multiplier == 1:
            total: Tensor = product.forward(inner, x)
            return total
        return self._add(x, norm(product.forward(inner)))

    def _add(self, x: States, update: States) -> States:
        multiplier = self.residual_multiplier
        return x + update if multiplier == 1 else torch.add(x, update, alpha=multiplier)


def _part(owner: nn.Module, *names: str) -> Any:
    """Return the part with one of several names.

    Raises:
        Unfusable: there is none.
    """
    name = next((name for name in names if hasattr(owner, name)), None)
    if name is None:
        raise Unfusable
    return getattr(owner, name)


def _parts(owner: nn.Module, alternatives: Sequence[tuple[str, ...]]) -> list[Any]:
    """Return the parts with the first names that exist; an empty list if none do."""
    names = next((names for names in alternatives if hasattr(owner, names[0])), ())
    return [getattr(owner, name, None) for name in names]


def _attention_function(attention: Any) -> Callable[..., tuple[Tensor, Any]]:
    eager: Any = vars(sys.modules[type(attention).__module__])["eager_attention_forward"]
    name = attention.config._attn_implementation
    options: dict[str, Any] = {"dropout": 0.0, "scaling": attention.scaling}
    if getattr(attention, "sliding_window", None) is not None:
        options["sliding_window"] = attention.sliding_window
    if getattr(attention, "attn_logit_softcapping", None) is not None:
        options["softcap"] = attention.attn_logit_softcapping
    if getattr(attention, "sinks", None) is not None:
        options["s_aux"] = attention.sinks
    return partial(ALL_ATTENTION_FUNCTIONS.get_interface(name, eager), attention, **options)


def _fast_norm(norm: nn.Module | None) -> Norm:
    """Return a norm as one operator, or the norm itself if no operator equals it."""
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    eps = next((getattr(norm, n) for n in ("variance_epsilon", "eps") if hasattr(norm, n)), None)
    if norm is None:
        return _identity
    if not isinstance(weight, Tensor) or weight.dim() != 1 or eps is None:
        return norm
    shape, gain = (len(weight),), weight.detach().float()
    x = 3 * torch.randn(3, *shape, device=weight.device) + 1
    expected: Tensor = deepcopy(norm).float()(x)
    for scale in (gain, 1 + gain) if bias is None else ():
        if are_close(rms_norm(x, shape, scale, eps), expected):
            return _fast_rms_norm(scale, weight.dtype, eps)
    shift = None if bias is None else bias.detach().float()
    if are_close(layer_norm(x, shape, gain, shift, eps), expected):
        shift = None if bias is None else bias.detach()
        return partial(
            layer_norm, normalized_shape=shape, weight=weight.detach(), bias=shift, eps=eps
        )
    return norm


def _fast_rms_norm(scale: Float[Tensor, " dim"], dtype: torch.dtype, eps: float) -> Norm:
    """Return an RMS norm with a scale, which stays in float32 where rounding would change it."""
    rounded = scale.to(dtype)
    is_exact = torch.equal(rounded.float(), scale)
    if scale.device.type == "cpu":
        twice = (rounded if is_exact else scale).repeat(2)
        return partial(rms_norm_on_cpu, weight=twice, eps=eps)
    if is_exact:
        return partial(rms_norm, normalized_shape=scale.shape, weight=rounded, eps=eps)
    return partial(_rms_norm_in_float32, weight=scale, eps=eps)


def _rms_norm_in_float32(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def _identity(x: Tensor) -> Tensor:
    return x


def _prepare(angles: tuple[Angles, Angles], rotation: Rotation) -> tuple[Tensor, Tensor, Rotation]:
    """Return cosines, and sines with the sign of the number that they are multiplied by.

    All layers of a step share them.
    """
    cos, sin = angles
    owner, by_rotation = sin, getattr(sin, "_prepared", {})
    if rotation not in by_rotation:
        half = sin.shape[-1] // 2
        if rotation == "halves":
            signed = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        elif rotation == "halves, once":
            cos, signed = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        else:
            if rotation == "neighbours, once":
                cos, sin = (part[..., :half].repeat_interleave(2, dim=-1) for part in angles)
            signed = torch.stack((-sin[..., ::2], sin[..., 1::2]), dim=-1).flatten(-2)
        by_rotation[rotation] = cos.unsqueeze(2), signed.unsqueeze(2), rotation
        owner._prepared = by_rotation  # type: ignore[attr-defined]
    prepared: tuple[Tensor, Tensor, Rotation] = by_rotation[rotation]
    return prepared


def _rotate(x: Heads, cos: Tensor, signed_sin: Tensor, rotation: Rotation) -> Heads:
    dim = cos.shape[-1]
    if dim < x.shape[-1]:
        return torch.cat((_rotate(x[..., :dim], cos, signed_sin, rotation), x[..., dim:]), dim=-1)
    if rotation.startswith("halves"):
        other = x.roll(dim // 2, dims=-1)
    else:
        other = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(x * cos, other, signed_sin).to(x.dtype)  # OLMo's angles are float32


def are_close(got: Tensor, expected: Tensor) -> bool:
    if got.shape != expected.shape:
        return False
    difference = (got.float() - expected.float()).abs().max()
    return bool(difference <= TOLERANCE * expected.abs().max().clamp(min=1e-6))
