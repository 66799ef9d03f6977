"""Checks that reject unsupported arguments, processors and prompts before decoding."""

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import GenerationConfig

from jakiro.errors import PromptError

# Arguments that request another decoding method or another kind of input, or that this package
# passes itself.
REFUSED = frozenset(
    {
        "assistant_model",
        "assistant_tokenizer",
        "cache",
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
# Fields of the generation config that request another decoding method or unsupported outputs, each
# with the values that disable the field.
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
    """Raise an error if an argument is unusable or not supported."""
    if temperature == 0 and generation.get("do_sample"):
        raise PromptError(
            "do_sample=True needs a temperature above 0",
            remedy="for greedy decoding, leave do_sample out",
        )
    if refused := sorted(name for name in REFUSED if generation.get(name) is not None):
        raise PromptError(
            "some arguments are not supported",
            expected="only a prompt and fields of GenerationConfig",
            got=", ".join(refused),
            remedy="leave these arguments out",
        )


def refuse_other_decoding(config: GenerationConfig, processors: Iterable[object]) -> None:
    """Raise an error if a config requests unsupported decoding, or a processor keeps a state."""
    for name, off in _OFF.items():
        if (value := getattr(config, name, None)) not in off:
            raise PromptError(
                f"{name} is not supported", expected=off[0], got=value, remedy="leave it out"
            )
    for name in (type(processor).__name__ for processor in processors):
        if name in _STATEFUL:
            raise PromptError(
                f"{name} is not supported, because it keeps a state between tokens",
                expected="processors that depend only on the tokens so far",
                got=name,
                remedy="leave this processor out",
            )


def refuse_several(num_sequences: int, processors: Iterable[object]) -> None:
    """Raise an error if there are several sequences, but a processor supports only one."""
    names = {type(processor).__name__ for processor in processors}
    if num_sequences > 1 and "PrefixConstrainedLogitsProcessor" in names:
        raise PromptError(
            "prefix_allowed_tokens_fn is not supported for several sequences at once",
            expected="one prompt",
            got=num_sequences,
            remedy="decode the prompts one by one",
        )


def check_length(prompt: int, total: int, max_position: int, index: int = 0) -> None:
    """Raise an error if a prompt and its new tokens do not fit into the target's context."""
    if prompt >= max_position or total > max_position:
        raise PromptError(
            f"prompt {index} and its new tokens do not fit into the target's context",
            expected=f"at most {max_position} positions",
            got=f"{prompt} prompt tokens and {total - prompt} new tokens",
            remedy="shorten the prompt or lower max_new_tokens",
        )


def refuse_single(prompts: object) -> None:
    """Raise an error if a single prompt was passed where several prompts are expected."""
    first = prompts[0] if isinstance(prompts, list) and prompts else None
    if isinstance(prompts, str) or isinstance(first, int | dict):
        raise PromptError(
            "a list of prompts is needed, but this is a single prompt",
            remedy="use generate(), or pass [prompt]",
        )
