"""Turns a prompt and keyword arguments into a request, through the target's own `generate()`."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)

from inference.engine import Request
from inference.sampling import Sampling
from inference.stopping import StopRule
from jakiro.errors import PromptError

# Arguments of generate() that mean another kind of decoding, or that `temperature` already decides.
REFUSED = frozenset({"assistant_model", "do_sample", "negative_prompt_ids", "streamer"})
# Fields of its config that do so, by the value that leaves them off.
_SEARCHES = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "prompt_lookup_num_tokens": None,
    "penalty_alpha": None,
    "dola_layers": None,
    "guidance_scale": None,
    "watermarking_config": None,
}

Prompt = str | list[dict[str, Any]] | list[int] | Tensor


@dataclass(frozen=True)
class Prepared:
    """What `generate()` hands to a decoding method."""

    input_ids: Int[Tensor, "batch prompt"]
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig


def prepare(
    model: PreTrainedModel,
    input_ids: Int[Tensor, "1 prompt"],
    temperature: float,
    seed: int,
    max_position: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **generation: Any,
) -> Request:
    """Return the request that `model.generate(input_ids, **generation)` describes.

    Processors, stopping criteria and defaults are prepared by Hugging Face's own `generate()`, so
    both decode the same law.

    Args:
        model: the target.
        input_ids: the prompt.
        temperature: 0 is greedy; otherwise tokens are sampled.
        seed: key of every random number.
        max_position: number of positions that the target has.
        tokenizer: finds stop strings.
        **generation: further `GenerationConfig` fields, such as max_new_tokens or top_p.

    Raises:
        PromptError: temperature or max_new_tokens is out of range, or prompt and continuation
            exceed the context.
    """
    if not temperature >= 0:
        raise PromptError(
            "unusable temperature", expected="0 (greedy) or a positive number", got=temperature
        )
    new_tokens = generation.get("max_new_tokens")
    if new_tokens is not None and new_tokens < 1:
        raise PromptError("unusable max_new_tokens", expected="at least 1", got=new_tokens)
    if refused := sorted(REFUSED & generation.keys()):
        raise PromptError(
            "arguments that cannot be honoured", expected="one sampled sequence", got=refused
        )
    random = {"do_sample": True, "temperature": float(temperature)}
    generate: Any = model.generate
    try:
        prepared: Prepared = generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            custom_generate=_capture,
            **(random if temperature > 0 else {"do_sample": False}),
            **_with_stop_strings(_with_padding(model, generation), tokenizer),
        )
    except (TypeError, ValueError) as error:
        raise PromptError("generate() refuses the arguments", got=error) from error
    _refuse_searches(prepared.config)
    sampling = Sampling(prepared.processors, do_sample=temperature > 0, seed=seed)
    max_length = _checked_length(prepared, max_position)
    return Request(input_ids, sampling, StopRule(prepared.criteria, input_ids.device), max_length)


def encode_prompt(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None, device: torch.device
) -> Int[Tensor, "1 prompt"]:
    """Return token ids of a text, a list of chat messages, or ids.

    Raises:
        PromptError: the prompt is empty, or needs a tokenizer or template that is not there.
    """
    if isinstance(prompt, Tensor):
        ids = prompt.reshape(1, -1) if prompt.dim() < 2 else prompt
    elif isinstance(prompt, str):
        ids = _needed(tokenizer)(prompt, return_tensors="pt")["input_ids"]
    elif prompt and isinstance(prompt[0], dict):
        ids = _templated(prompt, _needed(tokenizer))
    else:
        ids = torch.tensor([prompt], dtype=torch.long)
    if ids.shape[0] != 1:
        raise PromptError("one prompt at a time", expected="shape [1, tokens]", got=list(ids.shape))
    if ids.shape[1] == 0:
        raise PromptError("the prompt is empty", expected="at least one token", got=repr(prompt))
    return ids.to(device=device, dtype=torch.long)


def _capture(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **model_kwargs: Any,
) -> Prepared:
    """The decoding method that decodes nothing and returns what it was given."""
    return Prepared(input_ids, logits_processor, stopping_criteria, generation_config)


def _refuse_searches(config: GenerationConfig) -> None:
    """Refuse by name what would need another loop or a stateful processor.

    Raises:
        PromptError: the config asks for it.
    """
    for name, off in _SEARCHES.items():
        value = getattr(config, name, off)
        if value not in (off, None, 1):
            raise PromptError(
                f"{name} cannot be honoured", expected=off, got=value, remedy="leave it out"
            )


def _with_padding(model: PreTrainedModel, generation: dict[str, Any]) -> dict[str, Any]:
    """Name a pad token where there is none: one sequence needs no padding, but HF warns."""
    defaults = model.generation_config
    if defaults is None or defaults.pad_token_id is not None or "pad_token_id" in generation:
        return generation
    eos = defaults.eos_token_id
    pad = eos[0] if isinstance(eos, list) else eos
    return {**generation, "pad_token_id": 0 if pad is None else pad}


def _with_stop_strings(
    generation: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, Any]:
    """Turn stop strings into a criterion: `generate()` drops the tokenizer of a custom method."""
    strings = generation.get("stop_strings")
    if not strings:
        return generation
    rest = {key: value for key, value in generation.items() if key != "stop_strings"}
    criterion = StopStringCriteria(_needed(tokenizer), strings)
    criteria = StoppingCriteriaList([*rest.get("stopping_criteria", ()), criterion])
    return {**rest, "stopping_criteria": criteria}


def _checked_length(prepared: Prepared, max_position: int) -> int:
    prompt, total = prepared.input_ids.shape[1], int(prepared.config.max_length)
    if prompt >= max_position or total > max_position:
        raise PromptError(
            "prompt and new tokens do not fit into the target's context",
            expected=f"at most {max_position} positions",
            got=f"{prompt} prompt tokens and {total - prompt} new ones",
            remedy="shorten the prompt or lower max_new_tokens",
        )
    return total


def _needed(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        raise PromptError(
            "the decoder has no tokenizer",
            expected="token ids",
            got="text, messages or stop strings",
            remedy="pass tokenizer= to SpeculativeDecoder",
        )
    return tokenizer


def _templated(
    messages: list[dict[str, Any]] | list[int], tokenizer: PreTrainedTokenizerBase
) -> Tensor:
    if tokenizer.chat_template is None:
        raise PromptError(
            "the tokenizer has no chat template",
            expected="a tokenizer with a template, or plain text",
            got="chat messages",
            remedy="set tokenizer.chat_template or pass the text itself",
        )
    apply: Any = tokenizer.apply_chat_template
    encoded = apply(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids: Tensor = encoded["input_ids"]
    return ids
