"""Settings of drafters with the form of a tiny target's layer, and the outputs of layers."""

from typing import Any

import torch
from helpers.models import tiny_settings

from jakiro.drafter_settings import DrafterSettings

HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}  # as in the tiny targets


def layer_settings(
    kind: str, num_experts: int, width: int, tail_layers: int = 0, **trunk: Any
) -> DrafterSettings:
    """Return the settings of a drafter with a tiny target's heads and experts of size `width`."""
    settings = tiny_settings(
        num_experts=num_experts,
        combine="sum" if tail_layers else "mixture",
        parallel_levels=0,
        trunk={"kind": kind, **HEADS, **trunk},
        tail_layers=tail_layers,
    )
    return settings.model_copy(
        update={"experts": settings.experts.model_copy(update={"intermediate_size": width})}
    )


def outputs_of_layers(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Return the output of each layer; the last layer's output is taken before the final norm."""
    seen: dict[str, torch.Tensor] = {}
    with model.model.norm.register_forward_pre_hook(lambda _, args: seen.update(output=args[0])):
        states = model.model(ids, output_hidden_states=True).hidden_states
    return [*states[1:-1], seen["output"]]
