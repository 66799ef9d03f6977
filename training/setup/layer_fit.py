"""What a layer of a target reads and writes, told in terms of what a drafter reads.

With h_i the layer's input, h'_i its output and f_i the feature that the final norm makes of the
last layer's output: f_i is about s * h'_i, channel by channel, and s * h_i about a linear map of
what the drafter reads there, `[embedding(x_i); f_{i-1}]`. Both are least squares over some of the
training data. Before layers of the target that are left in place, s is 1.

Where a drafter reads fused hidden states u_{i-1} of verified tokens, they tell more than f_{i-1},
but beyond these tokens it reads its own prediction of f in the same place. Two maps are fitted at
once, that share what they make of the token, `A x_i + B f_{i-1}` and `A x_i + C u_{i-1}`; the
encoder of fused states is then told to write what B reads as C u.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import reduce
from operator import add
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import pad

from jakiro.drafter import JakiroDrafter
from jakiro.errors import NumericalError
from jakiro.target.adapter import TargetAdapter
from training.loss.batch import Batch
from training.loss.views import read_rows
from training.setup.target_layer import LayerFeedForward, layers_of


class Reading(NamedTuple):
    """What is known at each position, by what the drafter can read of it."""

    tokens: Float[Tensor, "batch rows hidden"]
    features: Float[Tensor, "batch rows hidden"]  # of the position before
    fused: Float[Tensor, "batch rows fused"] | None  # likewise
    predicted: (
        Float[Tensor, "batch rows hidden"] | None
    )  # at the position; None: the layer's output


def read_positions(drafter: JakiroDrafter, target: TargetAdapter, batch: Batch) -> Reading:
    """Return what the drafter reads at each position, and what it shall predict."""
    feature_input, settings = drafter.trunk.feature_input, drafter.config.settings
    assert feature_input is not None
    dtype = feature_input.join.weight.dtype
    num_rows, length = batch.token_ids.shape
    sources = drafter.state_sources._replace(memory=None)
    cache = target.new_cache(num_rows, length, sources.hidden_states)
    output = read_rows(target, batch, cache)
    features = output.features.to(dtype)
    embeddings = target.embed(batch.token_ids).to(dtype)
    tokens, before = feature_input.normed(embeddings, _of_the_one_before(features)).chunk(2, dim=-1)
    fused = None
    if settings.trunk.fusion_layers is not None:
        states = sources.read(cache, output.step.slots).features
        assert states is not None
        fused = _of_the_one_before(states.flatten(2).to(dtype))
    return Reading(tokens, before, fused, None if settings.tail_layers else features)


def _of_the_one_before(rows: Float[Tensor, "batch rows _"]) -> Float[Tensor, "batch rows _"]:
    return torch.cat((torch.zeros_like(rows[:, :1]), rows[:, :-1]), dim=1)


@contextmanager
def observed(layer: nn.Module, down: nn.Module | None) -> Iterator[dict[str, Tensor]]:
    """Yield what will hold the layer's input and output, and the activations of its units."""
    seen: dict[str, Tensor] = {}

    def note(_: nn.Module, args: tuple[Tensor, ...], named: dict[str, Tensor], out: object) -> None:
        seen["inputs"] = args[0] if args else named["hidden_states"]
        seen["outputs"] = out[0] if isinstance(out, tuple) else out  # type: ignore[assignment]

    def note_units(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen["units"] = args[0]

    hooks = [layer.register_forward_hook(note, with_kwargs=True)]
    if down is not None:
        hooks.append(down.register_forward_pre_hook(note_units))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


_RIDGE = 0.03  # of the mean square of what is read, tokens and features each by themselves
_ENCODER_RIDGE = 0.01  # of the mean square of what features become
_SMALLEST = 0.01  # scale of a channel, of the median one; gains are divided by it


class LayerFit(NamedTuple):
    """Where a drafter must start to be about the target's last layer.

    Attributes:
        scale: s, by which what the drafter predicts is larger than the stream.
        shrinkage: by which the stream's root mean square changes with that.
        weight: of the map from what the drafter reads to s * h.
        bias: of the map.
        encoder: from fused states to what is read in the place of features.
        strengths: root mean square of what each unit of the feed-forward part adds to the stream.
        explained: share of the variance of h that the map explains.
        num_tokens: that all of this was fitted on.
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
    """Sums over tokens, from which everything follows."""

    num_tokens: Tensor
    read: Tensor  # products of what is read, a 1 behind it, and fused states at the end
    wanted: Tensor  # of what is read with h
    inputs: Tensor  # squares of h
    outputs: Tensor  # squares of h'
    predicted: Tensor  # products of h' and what is predicted
    units: Tensor  # squares of the units' activations; of none if nobody asks

    def __add__(self, other: object) -> "_Sums":
        assert isinstance(other, _Sums)
        return _Sums(*(one + more for one, more in zip(self, other, strict=True)))


@torch.no_grad()
def fit_layer(
    drafter: JakiroDrafter,
    target: TargetAdapter,
    index: int,
    feed_forward: LayerFeedForward | None,
    batches: Iterable[Batch],
) -> LayerFit:
    """Return the fit over some batches.

    Args:
        drafter: whose trunk reads features; on the target's device.
        target: the frozen target.
        index: of the layer, negative from the end: the last, or the last before the drafter's tail.
        feed_forward: of the layer, if its units' strengths are wanted.
        batches: of training data.

    Raises:
        NumericalError: what the target computes of them is not finite.
    """
    layer = layers_of(target)[index]
    parts = (
        _sums_of(drafter, target, layer, feed_forward, one.to(target.device)) for one in batches
    )
    sums = reduce(add, parts)
    _require_finite(sums)
    return _solve(sums, target.spec.hidden_size, feed_forward)


def _sums_of(
    drafter: JakiroDrafter,
    target: TargetAdapter,
    layer: nn.Module,
    feed_forward: LayerFeedForward | None,
    batch: Batch,
) -> _Sums:
    down = None if feed_forward is None else feed_forward.module
    with observed(layer, down) as seen:
        reading = read_positions(drafter, target, batch)
    known = (batch.positions > 0) & (batch.documents >= 0)
    rows = {name: part[known].float() for name, part in seen.items()}
    inputs, outputs = rows["inputs"], rows["outputs"]
    predicted = outputs if reading.predicted is None else reading.predicted[known].float()
    read = _columns(reading, known)
    wanted = inputs if reading.fused is None else inputs.repeat(2, 1)
    return _Sums(
        num_tokens=known.sum(),
        read=read.T @ read,
        wanted=read.T @ wanted,
        inputs=inputs.square().sum(0),
        outputs=outputs.square().sum(0),
        predicted=(outputs * predicted).sum(0),
        units=rows.get("units", inputs[:, :0]).square().sum(0),
    )


def _require_finite(sums: _Sums) -> None:
    if all(bool(part.isfinite().all()) for part in sums):
        return
    raise NumericalError(
        "a drafter cannot be fitted to start as a layer of the target",
        expected="finite hidden states of the target on the first rows of training",
        got="NaN or infinity",
        remedy="read the target in another target.dtype, or set initialize.fit_tokens to 0",
    )


def _columns(reading: Reading, known: Bool[Tensor, "batch rows"]) -> Float[Tensor, "tokens read"]:
    """Return what is read of each token, and a 1; with fused states once more, by way of these."""
    tokens, features = (part[known].float() for part in (reading.tokens, reading.features))
    told = pad(torch.cat((tokens, features), dim=1), (0, 1), value=1.0)
    if reading.fused is None:
        return told
    fused = reading.fused[known].float()
    by_way_of_fused = (tokens, torch.zeros_like(features), torch.ones_like(told[:, :1]), fused)
    return torch.cat((pad(told, (0, fused.shape[1])), torch.cat(by_way_of_fused, dim=1)))


def _solve(sums: _Sums, hidden: int, feed_forward: LayerFeedForward | None) -> LayerFit:
    scale, size = _scale_of(sums), 2 * hidden + 1
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
    """Return s, the least squares of what is predicted by h', nowhere too small to divide by."""
    scale = sums.predicted / sums.outputs.clamp(min=torch.finfo(sums.outputs.dtype).tiny)
    floor = _SMALLEST * scale.abs().median()
    return torch.where(scale.abs() < floor, floor, scale)


def _ridge_of(squares: Float[Tensor, " read"], hidden: int) -> Float[Tensor, " read"]:
    """Return what is added to the squares: a share of their mean over columns of one kind.

    Tokens, features, the 1 and fused states may each be of another size.
    """
    sizes = (hidden, hidden, 1, len(squares) - 2 * hidden - 1)
    kinds = squares.split(sizes)
    return torch.cat([_RIDGE * kind.mean().expand(len(kind)) for kind in kinds if len(kind)])


def _explained(sums: _Sums, fitted: Float[Tensor, "read hidden"], hidden: int, times: int) -> float:
    """Return the share of the variance of h that a map explains; each token counts `times`."""
    missed = times * sums.inputs.sum() - 2 * (fitted * sums.wanted).sum()
    missed += (fitted * (sums.read @ fitted)).sum()
    total = sums.wanted[2 * hidden] / times
    variance = times * (sums.inputs.sum() - total.square().sum() / sums.num_tokens)
    return float(1 - missed / variance)


def _encoder(
    of_features: Float[Tensor, "hidden hidden"], of_fused: Float[Tensor, "fused hidden"]
) -> Float[Tensor, "hidden fused"]:
    """Return what makes of fused states that of which the map of features makes theirs."""
    square = of_features @ of_features.T
    ridge = _ENCODER_RIDGE * square.diagonal().mean() * torch.eye(len(square)).to(square)
    return torch.linalg.solve(square + ridge, of_features @ of_fused.T)
