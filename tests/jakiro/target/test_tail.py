"""The target's last layers, run by themselves, give the target's features and stay unchanged."""

import pytest
import torch
from helpers.drafting import assert_training_equals_drafting, assert_tree_equals_paths
from helpers.families import FAMILIES, WINDOW, tiny_family
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.quick import mostly_slow
from helpers.training import one_document, tiny_training
from torch import Tensor, nn
from transformers import PreTrainedModel

from jakiro.errors import TargetNotSupported
from jakiro.target.adapter import TargetAdapter
from jakiro.target.step import chain_step
from jakiro.target.tail import TargetTail
from training.loss.anchors import sample_blocks
from training.loss.drafting import draft_all_positions, through_tail

COUNT = 2 * WINDOW + 5
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
REVERSED = ["full_attention", "sliding_attention"] * 2

OFTEN = ["mistral", "gemma3", "mixtral", "llama4"]
REFUSED = {
    "gpt2": "layers that cannot be separated",
    "gptj": "layers that cannot be separated",
    "falcon": "layers that cannot be separated",
    "opt, projected": "layers that cannot be separated",
    "gemma3n": "layers that cannot be separated",
    "gemma4, shared rows": "layers that cannot be separated",
    "gemma4, heads of two widths": "without providing `input_ids`",  # has embeddings for each layer
    "granite": "features that differ by",  # also scales its input
    "opt": "features that differ by",  # adds positions to its input
}


def _tokens(count: int) -> Tensor:
    return torch.randint(2, 61, (1, count), generator=torch.Generator().manual_seed(count))


@torch.no_grad()
def _assert_tail_makes_the_features(model: PreTrainedModel, num_layers: int) -> None:
    """Compare a tail with the model's own hidden states, for more tokens than a window holds."""
    target = TargetAdapter(model)
    tail, tokens = TargetTail(target, num_layers), _tokens(COUNT)
    states = model(input_ids=tokens, output_hidden_states=True).hidden_states
    positions = torch.arange(COUNT)[None]
    cache = tail.new_cache(1, COUNT)
    cache.set_slots(positions, num_visible=COUNT)
    causal = torch.ones(1, COUNT, COUNT, dtype=torch.bool).tril()
    got = tail.forward(states[tail.input_state], positions, causal, positions, cache)
    torch.testing.assert_close(got, states[-1], **CLOSE)


@pytest.mark.parametrize("num_layers", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    "family", [*mostly_slow(sorted(set(FAMILIES) - set(REFUSED)), quick=OFTEN), "gemma3, reversed"]
)
def test_a_tail_makes_the_targets_features_of_its_hidden_states(
    family: str, num_layers: int
) -> None:
    changes = {"layer_types": REVERSED} if "reversed" in family else {}
    model = tiny_family(family.removesuffix(", reversed"), **changes)
    _assert_tail_makes_the_features(model, num_layers)


@pytest.mark.parametrize("family", ["gpt2", "gemma4, heads of two widths", "granite"])
def test_layers_that_cannot_run_alone_are_refused_by_name(family: str) -> None:
    model = tiny_family(family)
    with pytest.raises(TargetNotSupported, match=REFUSED[family]) as caught:
        TargetTail(TargetAdapter(model), 1)
    assert type(model).__name__ in str(caught.value)
    assert "set drafter.tail_layers to 0" in str(caught.value)


WINDOWED = {
    "mistral, tail-2": ("mistral", 2, {}),
    "gemma3, sliding last": ("gemma3", 2, {"layer_types": REVERSED}),
    "gemma3, narrower than a tree": (
        "gemma3",
        2,
        {"layer_types": REVERSED, "sliding_window": 3},
    ),
    "llama4, chunks": ("llama4", 2, {}),
}


OFTEN_WINDOWED = mostly_slow(WINDOWED, quick=["gemma3, narrower than a tree", "llama4, chunks"])


@pytest.mark.parametrize("length", [WINDOW - 3, COUNT])
@pytest.mark.parametrize("name", OFTEN_WINDOWED)
@torch.no_grad()
def test_windows_end_at_the_same_position_as_in_training(name: str, length: int) -> None:
    family, tail, changes = WINDOWED[name]
    target = TargetAdapter(tiny_family(family, **changes))
    settings = tiny_settings(combine="sum", parallel_levels=0, tail_layers=tail)
    assert_training_equals_drafting(target, tiny_drafter(target, settings), length, depth=6)


@pytest.mark.parametrize("name", OFTEN_WINDOWED)
@torch.no_grad()
def test_windows_of_a_tree_count_positions_and_not_slots(name: str) -> None:
    """A node's slot may lie beyond its position; here sequences exceed windows and chunks."""
    family, tail, changes = WINDOWED[name]
    target = TargetAdapter(tiny_family(family, **changes))
    settings = tiny_settings(combine="sum", parallel_levels=0, tail_layers=tail)
    assert_tree_equals_paths(target, tiny_drafter(target, settings), COUNT, passes=5)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_tail_in_training_equals_stock_layers_over_true_and_predicted_states(
    num_layers: int,
) -> None:
    """The published form runs the layers over 2S states [true; predicted] with one mask."""
    model = tiny_llama()
    target, count = TargetAdapter(model), 14
    tail, tokens = TargetTail(target, num_layers), _tokens(count)
    anchors = torch.from_numpy(sample_blocks(torch.zeros(count, dtype=torch.long).numpy(), 3, (4,)))
    batch = one_document(tokens, anchors)
    settings = tiny_settings(combine="sum", parallel_levels=0, tail_layers=num_layers)
    tiny = tiny_training(settings)
    view = tiny.view(batch)
    (output,) = draft_all_positions(tiny.drafter, view, batch)
    got = through_tail(output, tail, view, batch, 0).features[:, :, 0, 0]

    states = model(input_ids=tokens, output_hidden_states=True).hidden_states
    both = torch.cat((states[-1 - num_layers], output.mean_feature), dim=1)
    expected = _stock_layers(model, both, _double_mask(anchors, count), num_layers)[:, count:]
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    _assert_same_gradients(tiny.drafter, got, expected)


def _double_mask(anchors: Tensor, count: int) -> Tensor:
    """Mask: true i sees true j <= i; predicted i sees true j <= a_i and predicted a_i < j <= i."""
    mask = torch.full((2 * count, 2 * count), float("-inf"))
    for i in range(count):
        mask[i, : i + 1] = 0
        mask[count + i, : anchors[i] + 1] = 0
        mask[count + i, count + anchors[i] + 1 : count + i + 1] = 0
    return mask[None, None]


def _stock_layers(model: nn.Module, states: Tensor, mask: Tensor, num_layers: int) -> Tensor:
    decoder = model.get_decoder()
    positions = torch.arange(states.shape[1] // 2).repeat(2)[None]
    rotations = decoder.rotary_emb(states, positions)
    for layer in decoder.layers[-num_layers:]:
        output = layer(states, attention_mask=mask, position_embeddings=rotations)
        states = output if isinstance(output, Tensor) else output[0]
    return decoder.norm(states)


def _assert_same_gradients(drafter: nn.Module, got: Tensor, expected: Tensor) -> None:
    weights, parts = torch.randn_like(got), list(drafter.parameters())
    pairs = [
        torch.autograd.grad((output * weights).sum(), parts, allow_unused=True, retain_graph=True)
        for output in (got, expected)
    ]
    for mine, theirs in zip(*pairs, strict=True):
        if mine is None or theirs is None:
            assert mine is theirs
        else:
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_keys_and_values_that_a_tail_stores_are_those_of_the_targets_cache() -> None:
    target = TargetAdapter(tiny_llama())
    tail, slots = TargetTail(target, 2), torch.arange(9)[None]
    cache = target.new_cache(1, 16)
    target.forward(chain_step(_tokens(9), 0), cache)
    own = tail.new_cache(1, 16)
    tail.store(own, tail.kv(cache, slots), slots)
    for layer, stored in zip(cache.slot_layers[-2:], own.slot_layers, strict=True):
        assert torch.equal(layer.keys[:, :, :9], stored.keys[:, :, :9])
        assert torch.equal(layer.values[:, :, :9], stored.values[:, :, :9])
