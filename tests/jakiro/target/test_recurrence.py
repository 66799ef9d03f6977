"""Targets with recurrent layers: the probe, what is refused, and cached states of the layers."""

from collections.abc import Callable

import pytest
import torch
from helpers.families import EVERY_RECURRENT_FAMILY, REFUSED, tiny_family
from helpers.models import tiny_drafter, tiny_llama
from transformers import PreTrainedModel

from inference import SpeculativeDecoder
from inference.ahead import AheadDecoder
from inference.drafters.lookup import LookupDrafter
from inference.drafters.small_lm import SmallLMDrafter
from inference.trees.shape import TreeShape
from jakiro.errors import ConfigError, TargetNotSupported
from jakiro.target.adapter import TargetAdapter
from jakiro.target.cache import StateSource
from jakiro.target.step import chain_step
from jakiro.target.tail import TargetTail

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_models_that_read_several_tokens_otherwise_than_one_by_one_are_refused(family: str) -> None:
    with pytest.raises(TargetNotSupported, match=r"ForCausalLM do not read several tokens at once"):
        TargetAdapter(tiny_family(family))


def test_rounding_to_half_precision_is_told_from_other_ways_to_read() -> None:
    """With this seed, rounding chooses another expert in one of the texts."""
    TargetAdapter(tiny_family("lfm2_moe", seed=4).bfloat16())
    with pytest.raises(TargetNotSupported, match=r"ForCausalLM do not read several tokens at once"):
        TargetAdapter(tiny_family("jamba").bfloat16())


@pytest.mark.parametrize("family", EVERY_RECURRENT_FAMILY)
@torch.no_grad()
def test_keys_and_hidden_states_are_the_same_after_tokens_were_read_again(family: str) -> None:
    model = tiny_family(family)
    target = TargetAdapter(model)
    target.fuse()
    every = tuple(range(target.spec.num_hidden_states or 0))
    tokens = torch.randint(2, 61, (1, 20), generator=torch.Generator().manual_seed(0))
    cache = target.new_cache(1, 20, every)
    states = cache.states
    assert states is not None
    for end, accepted in ((7, 7), (12, 8), (13, 10), (16, 16), (17, 17), (20, 18)):
        (begin,) = states.boundaries
        step = chain_step(tokens[:, begin:end].clone(), begin)
        step.token_ids[:, max(0, accepted - begin) :] = 1  # wrong drafts
        target.forward(step, cache)
        if target.spec.replays:
            held = [layer.conv_states[0] for layer in cache.layers if hasattr(layer, "conv_states")]
            assert {state.shape[-1] for state in held} == {4}  # not the inputs of a whole text
        states.keep([accepted])
    expected = model(input_ids=tokens[:, :18], output_hidden_states=True).hidden_states
    got = cache.state(torch.arange(18)[None], StateSource("hidden", every))
    torch.testing.assert_close(got, torch.stack(expected, dim=2), **CLOSE)
    assert states.boundaries == ([18] if not target.spec.replays else [17])


def _uncompiled(model: PreTrainedModel) -> None:
    SpeculativeDecoder(model, compiled=True)


@torch.inference_mode()
def test_scans_of_few_tokens_are_short_in_copies_of_a_model() -> None:
    model = tiny_family("falcon_h1", mamba_chunk_size=256)
    target = TargetAdapter(model)
    target.fuse()
    tokens = torch.randint(2, 61, (1, 20), generator=torch.Generator().manual_seed(0))
    features = target.forward(chain_step(tokens, 0), target.new_cache(1, 20)).features
    torch.testing.assert_close(target.logits(features), model(input_ids=tokens).logits, **CLOSE)
    for layers, size in ((model, 256), (target.modules.layers, 32)):
        assert {part.chunk_size for part in layers.modules() if hasattr(part, "chunk_size")} == {
            size
        }


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (_uncompiled, "compiled=True"),
        (lambda model: SpeculativeDecoder(model, captured=True), "captured=True"),
        (lambda model: SpeculativeDecoder(model, batch_invariant=True), "batch_invariant=True"),
        (lambda model: TargetTail(TargetAdapter(model), 1), "tail_layers"),
        (lambda model: AheadDecoder(model, LookupDrafter(), tree="fixed"), "drafting ahead"),
    ],
)
def test_what_needs_trees_is_refused_by_name(
    build: Callable[[PreTrainedModel], object], message: str
) -> None:
    with pytest.raises(TargetNotSupported, match=f"{message} cannot be used with a target that"):
        build(tiny_family("lfm2"))


def test_models_with_recurrent_layers_are_no_small_models() -> None:
    with pytest.raises(TargetNotSupported, match="cannot draft trees"):
        SmallLMDrafter(tiny_family("lfm2"), tiny_llama())


def test_shapes_of_trees_are_refused() -> None:
    model = tiny_family("lfm2")
    with pytest.raises(ConfigError, match=r'are chains.*tree="auto"'):
        SpeculativeDecoder(model, tiny_drafter(TargetAdapter(model)), tree=TreeShape())
