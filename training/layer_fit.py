"""What the last layer of a target reads and writes, told in terms of what a drafter reads.

With h_i the layer's input, h'_i its output and f_i the feature that the final norm makes of it:
f_i is about s * h'_i, channel by channel, and s * h_i about a linear map of what the drafter reads
there, `[embedding(x_i); f_{i-1}]`. Both are least squares over some of the training data.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import reduce
from operator import add
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from jakiro.drafter import JakiroDrafter
from jakiro.target import TargetAdapter
from training.batch import Batch
from training.target_attention import layers_of
from training.target_feed_forward import LayerFeedForward
from training.views import read_rows

_RIDGE = 0.03  # of the mean square of what is read
_SMALLEST = 0.01  # scale of a channel, of the median one; gains are divided by it


class LayerFit(NamedTuple):
    """Where a drafter must start to be about the target's last layer.

    Attributes:
        scale: s, by which features are larger than the stream.
        shrinkage: by which the stream's root mean square changes with that.
        weight: of the map from what the drafter reads to s * h.
        bias: of the map.
        strengths: root mean square of what each unit of the feed-forward part adds to the stream.
        explained: share of the variance of h that the map explains.
        num_tokens: that all of this was fitted on.
    """

    scale: Float[Tensor, " hidden"]
    shrinkage: float
    weight: Float[Tensor, "hidden inputs"]
    bias: Float[Tensor, " hidden"]
    strengths: Float[Tensor, " units"] | None
    explained: float
    num_tokens: int


class _Sums(NamedTuple):
    """Sums over tokens, from which everything follows."""

    num_tokens: Tensor
    read: Tensor  # products of what is read, a 1 at its end
    wanted: Tensor  # of what is read with h
    inputs: Tensor  # squares of h
    outputs: Tensor  # squares of h'
    features: Tensor  # products of h' and f
    units: Tensor  # squares of the units' activations; of none if nobody asks

    def __add__(self, other: object) -> "_Sums":
        assert isinstance(other, _Sums)
        return _Sums(*(one + more for one, more in zip(self, other, strict=True)))


@torch.no_grad()
def fit_layer(
    drafter: JakiroDrafter,
    target: TargetAdapter,
    feed_forward: LayerFeedForward | None,
    batches: Iterable[Batch],
) -> LayerFit:
    """Return the fit over some batches.

    Args:
        drafter: whose trunk reads features; on the target's device.
        target: the frozen target.
        feed_forward: of the last layer, if its units' strengths are wanted.
        batches: of training data.
    """
    parts = (_sums_of(drafter, target, feed_forward, one.to(target.device)) for one in batches)
    return _solve(reduce(add, parts), feed_forward)


def _sums_of(
    drafter: JakiroDrafter,
    target: TargetAdapter,
    feed_forward: LayerFeedForward | None,
    batch: Batch,
) -> _Sums:
    down = None if feed_forward is None else feed_forward.module
    with _observed(layers_of(target)[-1], down) as seen:
        read, features = _read(drafter, target, batch)
    known = (batch.positions > 0) & (batch.documents >= 0)
    rows = {name: part[known].float() for name, part in seen.items()}
    inputs, outputs = rows["inputs"], rows["outputs"]
    read = torch.nn.functional.pad(read[known].float(), (0, 1), value=1.0)
    return _Sums(
        num_tokens=known.sum(),
        read=read.T @ read,
        wanted=read.T @ inputs,
        inputs=inputs.square().sum(0),
        outputs=outputs.square().sum(0),
        features=(outputs * features[known].float()).sum(0),
        units=rows.get("units", inputs[:, :0]).square().sum(0),
    )


def _solve(sums: _Sums, feed_forward: LayerFeedForward | None) -> LayerFit:
    scale = sums.features / sums.outputs.clamp(min=torch.finfo(sums.outputs.dtype).tiny)
    floor = _SMALLEST * scale.abs().median()
    scale = torch.where(scale.abs() < floor, floor, scale)
    ridge = _RIDGE * sums.read.diagonal().mean()
    fitted = torch.linalg.solve(
        sums.read + ridge * torch.eye(len(sums.read)).to(ridge), sums.wanted
    )
    missed = sums.inputs.sum() - 2 * (fitted * sums.wanted).sum()
    missed += (fitted * (sums.read @ fitted)).sum()
    variance = sums.inputs.sum() - sums.wanted[-1].square().sum() / sums.num_tokens
    strengths = None
    if feed_forward is not None:
        strengths = (sums.units / sums.num_tokens).sqrt() * feed_forward.down.float().norm(dim=0)
    return LayerFit(
        scale=scale,
        shrinkage=float(((scale.square() * sums.inputs).sum() / sums.inputs.sum()).sqrt()),
        weight=(fitted[:-1] * scale).T,
        bias=fitted[-1] * scale,
        strengths=strengths,
        explained=float(1 - missed / variance),
        num_tokens=int(sums.num_tokens),
    )


def _read(
    drafter: JakiroDrafter, target: TargetAdapter, batch: Batch
) -> tuple[Float[Tensor, "batch rows inputs"], Float[Tensor, "batch rows hidden"]]:
    """Return what the drafter reads at each position, and the target's features."""
    assert drafter.feature_encoder is not None
    assert drafter.trunk.feature_input is not None
    dtype = drafter.trunk.feature_input.join.weight.dtype
    num_rows, length = batch.token_ids.shape
    sources = drafter.state_sources._replace(memory=None)
    cache = target.new_cache(num_rows, length, sources.hidden_states)
    output = read_rows(target, batch, cache)
    state = sources.read(cache, output.step.slots).to(dtype)
    own = drafter.feature_encoder(state.features)
    previous = torch.cat((torch.zeros_like(own[:, :1]), own[:, :-1]), dim=1)
    embeddings = target.embed(batch.token_ids).to(dtype)
    return drafter.trunk.feature_input.normed(embeddings, previous), output.features


@contextmanager
def _observed(layer: nn.Module, down: nn.Module | None) -> Iterator[dict[str, Tensor]]:
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
