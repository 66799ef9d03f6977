"""Memory that starts as a layer's view equals that layer's attention over its keys and values."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.training import tiny_run
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError
from jakiro.target.adapter import TargetAdapter
from jakiro.target.cache import TargetState
from training.setup.initialization import check_initialization
from training.setup.layer_start import start_from
from training.setup.memory_start import start_memory
from training.setup.target_layer import read_attention
from training.train import train

LAYER = 2  # the last layer of the tiny targets


@pytest.mark.parametrize("layers", [(LAYER,), (0, LAYER, 1)])
@torch.no_grad()
def test_cross_attention_starts_as_the_attention_of_the_layer(layers: tuple[int, ...]) -> None:
    model: Any = tiny_llama()
    for name, weight in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(weight, 0.3, 1.7)
    target = TargetAdapter(model)
    drafter = tiny_drafter(
        target, tiny_settings(source="hidden", layers=layers, layer_attention=False)
    )
    heads = drafter.config.settings.trunk.heads_for(target.spec.attention)
    start_from(drafter.trunk, read_attention(target, LAYER, heads))
    start_memory(drafter, LAYER)
    token_ids = torch.randint(0, 61, (1, 9))
    states = model(token_ids, output_hidden_states=True).hidden_states
    positions = torch.arange(9)[None]
    read = torch.stack([states[layer] for layer in layers], dim=2)
    keys, values = drafter.encode_memory(TargetState(read, None), positions)[:2]
    got = _cross(drafter, states[LAYER], positions, (keys, values))
    torch.testing.assert_close(got, _attention(model, states[LAYER], positions))


def _cross(drafter: JakiroDrafter, stream: Tensor, positions: Tensor, memory: Any) -> Tensor:
    from moa.attention import KV

    cross = drafter.trunk.cross_attention
    assert cross is not None
    count = stream.shape[1]
    mask = torch.ones(1, 1, count, count, dtype=torch.bool).tril()
    return cross(stream, positions, KV(*memory), mask) - stream


def _attention(model: Any, stream: Tensor, positions: Tensor) -> Tensor:
    """Return what the model's own code adds for attention in the layer."""
    count = stream.shape[1]
    mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
    block = model.model.layers[LAYER]
    rotary = model.model.rotary_emb(stream, positions)
    return block.self_attn(
        hidden_states=block.input_layernorm(stream),
        position_embeddings=rotary,
        attention_mask=mask,
    )[0]


VIEW = {
    "drafter": {
        "trunk": {"kind": "hybrid", "num_heads": None, "num_kv_heads": None, "head_dim": None},
        "memory": {"source": "hidden", "layers": (0, -2), "layer_attention": False},
    },
    "initialize": {"attention_layer": "auto", "memory": "target_layer", "fit_tokens": 64},
}


def test_a_fitted_drafter_starts_with_the_view_in_place_of_its_self_attention(
    workshop: Path,
) -> None:
    settings = tiny_run(workshop, **VIEW, steps=2, checkpoint={"every": None})
    settings = settings.model_copy(
        update={"optimizer": settings.optimizer.model_copy(update={"learning_rate": 0.0})}
    )
    train(settings)
    drafter = JakiroDrafter.from_pretrained(settings.run_folder / "drafter")
    model: Any = AutoModelForCausalLM.from_pretrained(workshop / "target")
    trunk, own = drafter.trunk, model.model.layers[LAYER].self_attn
    assert trunk.cross_attention is not None
    assert not trunk.self_attention.output.weight.any()
    scale = trunk.cross_attention.output.weight / own.o_proj.weight
    torch.testing.assert_close(scale, scale[:, :1].expand_as(scale), rtol=1e-3, atol=1e-3)
    weight = trunk.cross_attention.key_value.weight
    torch.testing.assert_close(weight, torch.cat((own.k_proj.weight, own.v_proj.weight)))


@pytest.mark.parametrize(
    "memory",
    [
        {"source": "kv", "layers": None, "layer_attention": False},
        {"source": "hidden", "layers": (0, 1), "layer_attention": False},
        {"source": "hidden", "layers": (0, LAYER), "layer_attention": True},
        {"source": "hidden", "layers": (LAYER,), "layer_attention": False, "common_width": 8},
    ],
)
def test_memory_that_cannot_be_the_view_of_the_layer_is_refused(
    workshop: Path, memory: dict[str, Any]
) -> None:
    drafter = VIEW["drafter"] | {"memory": memory}
    settings = tiny_run(workshop, **(VIEW | {"drafter": drafter}))
    target = TargetAdapter(AutoModelForCausalLM.from_pretrained(workshop / "target"))
    with pytest.raises(ConfigError, match="view of layer 2"):
        check_initialization(settings, target)
