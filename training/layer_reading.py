"""What a drafter could read at every position, and what a layer of the target does there."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from jakiro.drafter import JakiroDrafter
from jakiro.target import TargetAdapter
from training.batch import Batch
from training.views import read_rows


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
