"""Every target family: logits in trees and greedy tokens equal those of the stock model."""

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from helpers.families import EVERY_FAMILY, WINDOW, tiny_family, tiny_model
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.trees import path_to, tree_step
from torch import Tensor, nn
from transformers import PreTrainedModel

from inference import SpeculativeDecoder
from inference.trees.shape import TreeShape
from jakiro.errors import PromptError, TargetNotSupported
from jakiro.target.adapter import TargetAdapter
from jakiro.target.cache import StateSource
from jakiro.target.step import StepInput, chain_step

BEYOND_THE_WINDOW = 2 * WINDOW + 5
NEW_TOKENS = WINDOW + 4
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def _tokens(count: int) -> Tensor:
    return torch.randint(2, 61, (1, count), generator=torch.Generator().manual_seed(count))


@torch.no_grad()
def _assert_tree_equals_paths(model: nn.Module, length: int) -> None:
    """Compare a tree after `length` tokens with its paths, then commit a path and read on."""
    target = TargetAdapter(model)
    target.fuse()
    prompt, drafts, more = _tokens(length), _tokens(8), _tokens(3)
    cache = target.new_cache(1, 64)
    target.forward(chain_step(prompt, 0), cache)
    step = tree_step(drafts, start=length)
    logits = target.logits(target.forward(step, cache).features)
    for query in range(8):
        path = torch.cat((prompt, drafts[:, path_to(query)]), dim=1)
        torch.testing.assert_close(logits[0, query], model(input_ids=path).logits[0, -1], **CLOSE)

    accepted = torch.tensor([path_to(7)])
    start = length + accepted.shape[1]
    cache.move(step.slots.gather(1, accepted), torch.arange(length, start)[None])
    got = target.logits(target.forward(chain_step(more, start), cache).features)
    path = torch.cat((prompt, drafts[:, path_to(7)], more), dim=1)
    torch.testing.assert_close(got[0], model(input_ids=path).logits[0, start:], **CLOSE)


def _assert_greedy_tokens_equal_generate(model: Any) -> None:
    target = TargetAdapter(model)
    widths = target.spec.kv_widths
    layers = tuple(layer for layer, width in enumerate(widths) if width == widths[0])
    drafter = tiny_drafter(target, tiny_settings(layers=layers))
    shape = TreeShape(children=4, breadth=3, num_nodes=12)
    decoder = SpeculativeDecoder(model, drafter, tree=shape)
    output = decoder.generate([3, 4, 5], max_new_tokens=NEW_TOKENS)
    ids = torch.tensor([[3, 4, 5]])
    arguments = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    assert (
        output.sequences.tolist()
        == model.generate(input_ids=ids, max_new_tokens=NEW_TOKENS, **arguments).tolist()
    )


@pytest.mark.parametrize("family", EVERY_FAMILY)
@torch.no_grad()
def test_hidden_states_of_accepted_nodes_are_those_of_the_stock_model(family: str) -> None:
    model = tiny_family(family)
    target = TargetAdapter(model)
    if family in {"gemma3n", "opt, projected"}:  # several residual streams, or another width
        assert target.spec.num_hidden_states is None
        return
    every = tuple(range(target.spec.num_hidden_states))
    prompt, drafts = _tokens(5), _tokens(8)
    cache = target.new_cache(1, 64, every)
    target.forward(chain_step(prompt, 0), cache)
    step = tree_step(drafts, start=5)
    features = target.forward(step, cache).features
    source = StateSource("hidden", every)
    torch.testing.assert_close(cache.state(step.slots, source)[:, :, -1], features)
    accepted = torch.tensor([path_to(7)])
    end = 5 + accepted.shape[1]
    cache.move(step.slots.gather(1, accepted), torch.arange(5, end)[None])
    path = torch.cat((prompt, drafts[:, path_to(7)]), dim=1)
    expected = model(input_ids=path, output_hidden_states=True).hidden_states
    got = cache.state(torch.arange(end)[None], source)
    torch.testing.assert_close(got, torch.stack(expected, dim=2), **CLOSE)


@pytest.mark.parametrize("length", [pytest.param(5, marks=pytest.mark.slow), BEYOND_THE_WINDOW])
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_trees_equal_paths_and_commits_equal_recomputing(family: str, length: int) -> None:
    _assert_tree_equals_paths(tiny_family(family), length)


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_greedy_tokens_equal_those_of_generate(family: str) -> None:
    _assert_greedy_tokens_equal_generate(tiny_family(family, vocab_size=11))


@pytest.mark.parametrize("family", ["llama, grouped heads", "mistral", "gemma3", "llama4"])
@torch.no_grad()
def test_packed_documents_are_isolated(family: str) -> None:
    model = tiny_family(family)
    target = TargetAdapter(model)
    documents = [_tokens(count) for count in (13, 21)]
    step = StepInput(
        token_ids=torch.cat(documents, dim=1),
        positions=torch.tensor([[*range(13), *range(21)]]),
        slots=torch.arange(34)[None],
        lengths=torch.tensor([0]),
        highest_slot=33,
        documents=torch.tensor([[0] * 13 + [1] * 21]),
    )
    logits = target.logits(target.forward(step, target.new_cache(1, 34)).features)
    expected = torch.cat([model(input_ids=document).logits for document in documents], dim=1)
    torch.testing.assert_close(logits, expected, **CLOSE)


def test_layers_that_reuse_keys_and_values_of_others_store_none() -> None:
    spec = TargetAdapter(tiny_family("gemma4, shared rows")).spec
    assert spec.kv_widths == (32, 32)


def test_the_text_part_of_a_multimodal_model_is_a_target() -> None:
    text = tiny_family("mistral").config.to_dict()
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    model = tiny_model(
        "Mistral3ForConditionalGeneration",
        text_config=text,
        vision_config={"model_type": "pixtral", "image_size": 16, "patch_size": 8, **vision},
        image_token_index=60,
    )
    _assert_tree_equals_paths(model, BEYOND_THE_WINDOW)
    _assert_greedy_tokens_equal_generate(model)


def _with_longrope() -> PreTrainedModel:
    model = tiny_family("gemma3")
    model.config.rope_parameters["sliding_attention"]["rope_type"] = "longrope"
    return model


def _with_flash_attention() -> PreTrainedModel:
    model = tiny_llama()
    model.config._attn_implementation_internal = "flash_attention_2"
    return model


def _on_two_devices() -> PreTrainedModel:
    model = tiny_llama()
    model.model.layers[1].to("meta")
    return model


def _without_numbers() -> PreTrainedModel:
    model = tiny_llama()
    nn.init.constant_(model.model.norm.weight, float("nan"))
    return model


LOCAL = {"attention_types": [[["global", "local"], 2]], "window_size": 8}
SPECIAL_IDS = {"bos_token_id": 0, "cls_token_id": 0, "sep_token_id": 1}
OTHER_WIDTHS = {"input_embedding_size": 16, "output_embedding_size": 24}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: tiny_llama(sliding_window=WINDOW), "window that the target's layers do not apply"),
        (lambda: tiny_model("BloomForCausalLM"), "order of its cache.*Bloom"),
        (lambda: tiny_model("FalconForCausalLM", alibi=True), "order of its cache.*Falcon"),
        (lambda: tiny_model("GPTNeoForCausalLM", **LOCAL), "by their index in the cache"),
        (
            lambda: tiny_model("ModernBertDecoderForCausalLM", is_decoder=True, **SPECIAL_IDS),
            "reproduce",
        ),
        (lambda: tiny_model("RemBertForCausalLM", is_decoder=True, **OTHER_WIDTHS), "not as wide"),
        (
            lambda: tiny_model("ElectraForCausalLM", is_decoder=True, embedding_size=16),
            "not as wide",
        ),
        (_with_longrope, "longrope"),
        (_with_flash_attention, "takes no mask"),
        (_on_two_devices, "several devices; got: cpu, meta"),
        (_without_numbers, "not finite numbers, also without this package"),
        (lambda: _quantize(tiny_llama(), quantize_inputs=True), "quantized activations"),
    ],
)
def test_what_cannot_verify_trees_is_refused(
    build: Callable[[], PreTrainedModel], message: str
) -> None:
    model = build()
    with pytest.raises(TargetNotSupported, match=message):
        TargetAdapter(model)


def test_texts_of_llama4_are_too_short_for_temperatures_that_depend_on_the_position() -> None:
    model = tiny_family("llama4", floor_scale=32)
    _assert_tree_equals_paths(model, BEYOND_THE_WINDOW)
    with pytest.raises(PromptError, match="at most 31 positions"):
        SpeculativeDecoder(model).generate([1, 2], max_new_tokens=30)


# PEFT uses a deprecated attribute of transformers.
BUILDS_AN_ADAPTER = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


def _with_lora(model: PreTrainedModel) -> peft.PeftModel:
    """Add adapters that change every distribution: random weights instead of initial zeros."""
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(model, config).eval()
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            nn.init.normal_(weight, std=0.3)
    return adapted


@BUILDS_AN_ADAPTER
def test_a_model_with_lora_adapters_is_a_target() -> None:
    original = tiny_llama()(input_ids=_tokens(5)).logits
    adapted = _with_lora(tiny_llama())
    assert (adapted(input_ids=_tokens(5)).logits - original).abs().max() > 0.1
    _assert_tree_equals_paths(adapted, length=5)
    _assert_greedy_tokens_equal_generate(adapted)


@BUILDS_AN_ADAPTER
def test_adapters_of_virtual_tokens_are_named_in_an_error() -> None:
    config = peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    with pytest.raises(TargetNotSupported, match="PROMPT_TUNING"):
        TargetAdapter(peft.get_peft_model(tiny_llama(), config).eval())


class _EightBitLinear(nn.Module):
    """A linear layer with 8-bit weights and, on request, 8-bit inputs with one common scale."""

    def __init__(self, linear: nn.Linear, quantize_inputs: bool) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.quantize_inputs = quantize_inputs

    def forward(self, features: Tensor) -> Tensor:
        if self.quantize_inputs:
            unit = features.abs().amax() / 127
            features = (features / unit).round() * unit
        return features @ (self.weight * self.scale).T


def _quantize(model: PreTrainedModel, quantize_inputs: bool = False) -> PreTrainedModel:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, _EightBitLinear(child, quantize_inputs))
    return model


def test_a_target_with_quantized_weights_is_decoded_exactly() -> None:
    model = _quantize(tiny_llama())
    _assert_tree_equals_paths(model, length=5)
    _assert_greedy_tokens_equal_generate(model)
