"""Every tensor of a published drafter is accounted for."""

from pathlib import Path

import pytest
import torch
from helpers.published import Weights, eagle_config, eagle_weights, save_published

from jakiro.errors import CheckpointError
from jakiro.exchange.checkpoint import read_checkpoint
from jakiro.exchange.families import plan_import

GATE = "layers.0.mlp.gate_proj.weight"
QUERY = "layers.0.self_attn.q_proj.weight"


def _plan(folder: Path, weights: Weights) -> None:
    plan_import(read_checkpoint(save_published(folder, weights, eagle_config())))


@pytest.mark.parametrize("name", [GATE, QUERY])
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    weights = eagle_weights()
    del weights[name]
    with pytest.raises(CheckpointError, match=f"a tensor {name}; got: none"):
        _plan(tmp_path, weights)


@pytest.mark.parametrize("name", [GATE, QUERY, "fc.bias"])
def test_a_misshapen_tensor_is_named(name: str, tmp_path: Path) -> None:
    weights = eagle_weights()
    weights[name] = torch.zeros(*weights[name].shape, 2)
    with pytest.raises(CheckpointError, match=name):
        _plan(tmp_path, weights)


@pytest.mark.parametrize("name", ["layers.1.mlp.gate_proj.weight", "layers.0.mlp.gate_proj.bias"])
def test_a_tensor_that_nothing_uses_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"1 others: {name}"):
        _plan(tmp_path, eagle_weights() | {name: torch.zeros(3)})


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_weights_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    weights = eagle_weights()
    weights[GATE] = weights[GATE].to(dtype)
    folder = save_published(tmp_path, weights, eagle_config())
    with pytest.raises(CheckpointError, match=rf"numbers of 16, 32 or 64 bits in {GATE}; got: "):
        plan_import(read_checkpoint(folder))
