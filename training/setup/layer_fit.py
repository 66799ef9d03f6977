"""A least-squares fit of a drafter's input to a layer of the target.

At position i, let e_i be the embedding of the token, h_i the layer's input, h'_i the layer's
output, and f_i the feature, which is the last layer's output after the final norm. Then f_i is
approximately s * h'_i, channel by channel, and s * h_i is approximately a linear map of the
drafter's input `[e_i; f_{i-1}]`. Both approximations are least-squares fits to a part of the
training data. If tail layers follow the drafter, s is 1.

A drafter with fusion layers reads the fused hidden states u_{i-1} of verified tokens instead of
f_{i-1}, because fused states contain more information. After the verified tokens, the drafter reads
its own predictions of f. Therefore, two maps are fitted together, `A e_i + B f_{i-1}` and
`A e_i + C u_{i-1}`, which share the matrix A for the token. The encoder of fused states is
initialized with the least-squares solution E of `B E u = C u`.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import add
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import pad

from jakiro.drafter import JakiroDrafter
from jakiro.errors import NumericalError
from jakiro.target.adapter import TargetAdapter
from training.loss.batch import Batch, read_batch
from training.setup.target_layer import LayerFeedForward, layers_of

# Penalty of a ridge regression, as a share of the mean square of each kind of input.
_RIDGE = 0.03

# Penalty for the encoder, as a share of the mean squared norm of the columns of B.
_ENCODER_RIDGE = 0.01

# Smallest scale of a channel, relative to the median. The bound is needed because the gains of the
# drafter's norms are divided by the scale.
_SMALLEST = 0.01


class DrafterInputs(NamedTuple):
    """The inputs of a drafter at each position, and the feature that it learns to predict."""

    tokens: Float[Tensor, "batch length hidden"]
    features: Float[Tensor, "batch length hidden"]
    fused: Float[Tensor, "batch length fused"] | None
    predicted: Float[Tensor, "batch length hidden"] | None


def read_positions(drafter: JakiroDrafter, target: TargetAdapter, batch: Batch) -> DrafterInputs:
    feature_input, settings = drafter.trunk.feature_input, drafter.config.settings
    assert feature_input is not None
    dtype = drafter.dtype
    batch_size, length = batch.token_ids.shape
    sources = drafter.state_sources._replace(memory=None)
    cache = target.new_cache(batch_size, length, sources.hidden_states)
    output = read_batch(target, batch, cache)
    features = output.features.to(dtype)
    embeddings = target.embed(batch.token_ids).to(dtype)
    tokens, before = feature_input.normed(embeddings, _shift(features)).chunk(2, dim=-1)
    fused = None
    if settings.trunk.fusion_layers is not None:
        states = sources.read(cache, output.step.slots).features
        assert states is not None
        fused = _shift(states.flatten(2).to(dtype))
    return DrafterInputs(tokens, before, fused, None if settings.tail_layers else features)


def _shift(states: Float[Tensor, "batch length _"]) -> Float[Tensor, "batch length _"]:
    """Return the states of the preceding positions; zeros at the first position."""
    return torch.cat((torch.zeros_like(states[:, :1]), states[:, :-1]), dim=1)


@contextmanager
def observe(layer: nn.Module, down: nn.Module | None) -> Iterator[dict[str, Tensor]]:
    """Yield a dictionary that receives a layer's inputs, outputs, and feed-forward activations."""
    seen: dict[str, Tensor] = {}

    def keep(_: nn.Module, args: tuple[Tensor, ...], named: dict[str, Tensor], out: object) -> None:
        seen["inputs"] = args[0] if args else named["hidden_states"]
        seen["outputs"] = out[0] if isinstance(out, tuple) else out  # type: ignore[assignment]

    def keep_units(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen["units"] = args[0]

    hooks = [layer.register_forward_hook(keep, with_kwargs=True)]
    if down is not None:
        hooks.append(down.register_forward_pre_hook(keep_units))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


class LayerFit(NamedTuple):
    """The result of a fit: weights with which a drafter approximates a layer.

    Attributes:
        scale: s, the ratio of what the drafter predicts to the layer's output, channel by channel.
        shrinkage: ratio of the root mean square of s * h to that of h.
        weight: weight of the map from the drafter's inputs to s * h.
        encoder: weight of the map from fused states to the features that they replace; None if
            there are no fusion layers.
        strengths: root mean square of each feed-forward unit's contribution to the residual stream;
            None if no feed-forward part was given.
    """

    scale: Float[Tensor, " hidden"]
    shrinkage: float
    weight: Float[Tensor, "hidden inputs"]
    bias: Float[Tensor, " hidden"]
    encoder: Float[Tensor, "hidden fused"] | None
    strengths: Float[Tensor, " units"] | None
    explained: float
    num_tokens: int


class _Sums(NamedTuple):
    """Sums over tokens, from which the fit is computed."""

    num_tokens: Tensor
    read: Tensor  # products of every two columns that `_columns` returns
    wanted: Tensor  # products of these columns and h
    inputs: Tensor  # squares of h
    outputs: Tensor  # squares of h'
    predicted: Tensor  # products of h' and the state that the drafter learns to predict
    units: Tensor  # squares of the units' activations; empty if units are not observed


@torch.no_grad()
def fit_layers(
    drafter: JakiroDrafter,
    target: TargetAdapter,
    indices: Sequence[int],
    feed_forwards: Sequence[LayerFeedForward | None],
    batches: Iterable[Batch],
) -> list[LayerFit]:
    """Return the fits of successive layers of the target, computed over the given batches.

    All have the scale of the last of them, whose output is what the drafter predicts.

    Args:
        indices: negative indices of the layers, from the end: up to the last layer, or the last one
            before the drafter's tail layers.
        feed_forwards: weights of each layer's feed-forward part; None to leave out the strengths of
            its units.
    """
    layers = [layers_of(target)[index] for index in indices]
    downs = [None if part is None else part.module for part in feed_forwards]
    sums: list[_Sums] = []
    for batch in batches:
        of_batch = _sums_of(drafter, target, layers, downs, batch.to(target.device))
        pairs = zip(sums, of_batch, strict=True)
        sums = [_Sums(*map(add, *pair)) for pair in pairs] if sums else of_batch
    if not all(bool(part.isfinite().all()) for layer in sums for part in layer):
        raise NumericalError(
            "hidden states of the target are not finite on the first training sequences",
            remedy="choose another target.dtype, or set initialize.fit_tokens to 0",
        )
    scale, hidden = _scale_of(sums[-1]), target.spec.hidden_size
    return [
        _solve(of_layer, scale, hidden, feed_forward)
        for of_layer, feed_forward in zip(sums, feed_forwards, strict=True)
    ]


def _sums_of(
    drafter: JakiroDrafter,
    target: TargetAdapter,
    layers: Sequence[nn.Module],
    downs: Sequence[nn.Module | None],
    batch: Batch,
) -> list[_Sums]:
    with ExitStack() as stack:
        each = [stack.enter_context(observe(*pair)) for pair in zip(layers, downs, strict=True)]
        drafted = read_positions(drafter, target, batch)
    is_used = (batch.positions > 0) & (batch.documents >= 0)
    read = _columns(drafted, is_used)
    products = read.T @ read
    sums = []
    for seen in each:
        parts = {name: part[is_used].float() for name, part in seen.items()}
        inputs, outputs = parts["inputs"], parts["outputs"]
        predicted = outputs if drafted.predicted is None else drafted.predicted[is_used].float()
        wanted = inputs if drafted.fused is None else inputs.repeat(2, 1)
        sums.append(
            _Sums(
                num_tokens=is_used.sum(),
                read=products,
                wanted=read.T @ wanted,
                inputs=inputs.square().sum(0),
                outputs=outputs.square().sum(0),
                predicted=(outputs * predicted).sum(0),
                units=parts.get("units", inputs[:, :0]).square().sum(0),
            )
        )
    return sums


def _columns(
    inputs: DrafterInputs, is_used: Bool[Tensor, "batch length"]
) -> Float[Tensor, "tokens read"]:
    """Return the drafter's inputs as one row per token, or two rows if there are fused states.

    columns       token   feature   constant   fused state
    first rows    e       f         1          0
    second rows   e       0         1          u
    """
    tokens, features = (part[is_used].float() for part in (inputs.tokens, inputs.features))
    columns = pad(torch.cat((tokens, features), dim=1), (0, 1), value=1.0)
    if inputs.fused is None:
        return columns
    fused = inputs.fused[is_used].float()
    with_fused = (tokens, torch.zeros_like(features), torch.ones_like(columns[:, :1]), fused)
    return torch.cat((pad(columns, (0, fused.shape[1])), torch.cat(with_fused, dim=1)))


def _solve(
    sums: _Sums, scale: Tensor, hidden: int, feed_forward: LayerFeedForward | None
) -> LayerFit:
    size = 2 * hidden + 1
    squares = sums.read.diagonal()
    has_fused = len(squares) > size
    fitted = torch.linalg.solve(sums.read + _ridge_of(squares, hidden).diag(), sums.wanted)
    strengths = None
    if feed_forward is not None:
        strengths = (sums.units / sums.num_tokens).sqrt() * feed_forward.down.float().norm(dim=0)
    return LayerFit(
        scale=scale,
        shrinkage=float(((scale.square() * sums.inputs).sum() / sums.inputs.sum()).sqrt()),
        weight=(fitted[: 2 * hidden] * scale).T,
        bias=fitted[2 * hidden] * scale,
        encoder=_encoder(fitted[hidden : 2 * hidden], fitted[size:]) if has_fused else None,
        strengths=strengths,
        explained=_explained(sums, fitted, hidden, times=1 + has_fused),
        num_tokens=int(sums.num_tokens),
    )


def _scale_of(sums: _Sums) -> Float[Tensor, " hidden"]:
    """Return s, the least-squares ratio of the prediction to h', bounded away from zero."""
    scale = sums.predicted / sums.outputs.clamp(min=torch.finfo(sums.outputs.dtype).tiny)
    floor = _SMALLEST * scale.abs().median()
    return torch.where(scale.abs() < floor, floor, scale)


def _ridge_of(squares: Float[Tensor, " read"], hidden: int) -> Float[Tensor, " read"]:
    """Return the ridge of each column: a share of the mean square of all columns of its kind.

    Tokens, features, the constant 1, and fused states are separate kinds, because their magnitudes
    may differ.
    """
    sizes = (hidden, hidden, 1, len(squares) - 2 * hidden - 1)
    kinds = squares.split(sizes)
    return torch.cat([_RIDGE * kind.mean().expand(len(kind)) for kind in kinds if len(kind)])


def _explained(sums: _Sums, fitted: Float[Tensor, "read hidden"], hidden: int, times: int) -> float:
    """Return the share of the variance of h that a map explains, with `times` rows per token."""
    missed = times * sums.inputs.sum() - 2 * (fitted * sums.wanted).sum()
    missed += (fitted * (sums.read @ fitted)).sum()
    total = sums.wanted[2 * hidden] / times
    variance = times * (sums.inputs.sum() - total.square().sum() / sums.num_tokens)
    return float(1 - missed / variance)


def _encoder(
    of_features: Float[Tensor, "hidden hidden"], of_fused: Float[Tensor, "fused hidden"]
) -> Float[Tensor, "hidden fused"]:
    """Return the least-squares solution E of `of_features^T E = of_fused^T`."""
    square = of_features @ of_features.T
    ridge = _ENCODER_RIDGE * square.diagonal().mean() * torch.eye(len(square)).to(square)
    return torch.linalg.solve(square + ridge, of_features @ of_fused.T)
