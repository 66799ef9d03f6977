"""What decoding cannot do, refused by name and before any work."""

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import GenerationConfig

from jakiro.errors import PromptError

# Arguments of generate() that mean another kind of decoding or another input.
REFUSED = frozenset(
    {
        "assistant_model",
        "assistant_tokenizer",
        "cache_implementation",
        "custom_generate",
        "inputs_embeds",
        "negative_prompt_attention_mask",
        "negative_prompt_ids",
        "max_position",
        "past_key_values",
        "position_ids",
        "streamer",
        "synced_gpus",
        "token_type_ids",
        "tokenizer",
    }
)
# Fields of its config that do so, by the values that leave them off.
_OFF: dict[str, tuple[Any, ...]] = {
    "num_beams": (1, None),
    "num_beam_groups": (1, None),
    "constraints": (None,),
    "force_words_ids": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "speculation_type": (None,),
    "use_mtp": (None, False),
    "penalty_alpha": (None, 0.0),
    "dola_layers": (None,),
    "guidance_scale": (None, 1, 1.0),
    "watermarking_config": (None,),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
}
# Processors whose scores depend on more than the tokens so far.
_STATEFUL = frozenset(
    {
        "AlternatingCodebooksLogitsProcessor",
        "ClassifierFreeGuidanceLogitsProcessor",
        "DiaClassifierFreeGuidanceLogitsProcessor",
        "DiaEOSDelayPatternLogitsProcessor",
        "SynthIDTextWatermarkLogitsProcessor",
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
        "WatermarkLogitsProcessor",
        "WhisperTimeStampLogitsProcessor",
    }
)


def refuse_arguments(temperature: float | None, generation: Mapping[str, Any]) -> None:
    """Refuse arguments that cannot be used.

    Raises:
        PromptError: naming them.
    """
    if temperature is not None and not _is_temperature(temperature):
        raise PromptError(
            "unusable temperature", expected="0 (greedy) or a positive number", got=temperature
        )
    if temperature is not None and "do_sample" in generation:
        raise PromptError(
            "temperature and do_sample say the same thing",
            expected="one of them",
            got=f"temperature={temperature} and do_sample={generation['do_sample']}",
            remedy="leave do_sample out",
        )
    new_tokens = generation.get("max_new_tokens")
    if new_tokens is not None and not (isinstance(new_tokens, int) and new_tokens >= 1):
        raise PromptError("unusable max_new_tokens", expected="at least 1", got=new_tokens)
    if refused := sorted(name for name in REFUSED if generation.get(name) is not None):
        raise PromptError(
            "arguments that cannot be honoured",
            expected="a prompt, and fields of GenerationConfig",
            got=", ".join(refused),
            remedy="leave them out",
        )


def _is_temperature(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < float("inf")


def refuse_other_decoding(config: GenerationConfig, processors: Iterable[object]) -> None:
    """Refuse by name what would need another loop, or a processor that keeps a state.

    Raises:
        PromptError: the config or the processors ask for it.
    """
    for name, off in _OFF.items():
        if (value := getattr(config, name, None)) not in off:
            raise PromptError(
                f"{name} cannot be honoured", expected=off[0], got=value, remedy="leave it out"
            )
    for one in processors:
        if type(one).__name__ in _STATEFUL:
            raise PromptError(
                f"{type(one).__name__} cannot be honoured: it keeps a state between tokens",
                expected="processors that depend on the tokens so far alone",
                got=type(one).__name__,
                remedy="leave it out",
            )


def refuse_several(num_rows: int, processors: Iterable[object]) -> None:
    """Refuse what cannot be told apart for several sequences.

    Raises:
        PromptError: a constraint depends on the row of the batch.
    """
    names = {type(one).__name__ for one in processors}
    if num_rows > 1 and "PrefixConstrainedLogitsProcessor" in names:
        raise PromptError(
            "prefix_allowed_tokens_fn cannot be honoured for several sequences at once",
            expected="one prompt",
            got=num_rows,
            remedy="decode the prompts one by one",
        )


def check_length(prompt: int, total: int, max_position: int, row: int = 0) -> None:
    """Refuse what does not fit into the target's context.

    Raises:
        PromptError: naming both lengths.
    """
    if prompt >= max_position or total > max_position:
        raise PromptError(
            f"prompt {row} and its new tokens do not fit into the target's context",
            expected=f"at most {max_position} positions",
            got=f"{prompt} prompt tokens and {total - prompt} new ones",
            remedy="shorten the prompt or lower max_new_tokens",
        )
