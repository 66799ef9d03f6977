"""Planned imports of published drafters of EAGLE-3, and a target with the layers that they read."""

from pathlib import Path
from typing import Any

from helpers.models import tiny_llama
from helpers.published import Weights, save_published

from jakiro.exchange.checkpoint import read_checkpoint
from jakiro.exchange.families import plan_import
from jakiro.exchange.plan import ImportPlan

LAYERS = (1, 3, 5)
IDS = {"eagle_aux_hidden_state_layer_ids": list(LAYERS)}


def six_layer_target() -> Any:
    """Return a target of six layers in float64."""
    return tiny_llama(num_hidden_layers=6).double()


def planned(folder: Path, weights: Weights, config: dict[str, Any]) -> ImportPlan:
    """Write a published drafter, and return the plan of its import."""
    return plan_import(read_checkpoint(save_published(folder, weights, config)))
