"""Requests from prompts and keyword arguments, prepared by the target's own `generate()`."""

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.configuration_utils import GenerationMode

from inference.engine.request import Request, StopRule
from inference.generation.prompts import needed
from inference.sampling.grammar import GrammarEnd, GrammarProcessor
from inference.sampling.options import Sampling
from jakiro.errors import PromptError
from jakiro.target.checks import CausalLM
from jakiro.utils.pretrained import end_ids

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
# Processors whose scores depend on more than the tokens so far.
_STATEFUL = frozenset(
    {
        "SynthIDTextWatermarkLogitsProcessor",
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
        "WatermarkLogitsProcessor",
    }
)


@dataclass(frozen=True)
class Handover:
    """The arguments that `generate()` passes to a decoding method.

    Attributes:
        input_ids: token ids of the prompt, or of all prompts if `generate()` was called with a
            batch.
    """

    model: CausalLM
    input_ids: Int[Tensor, "batch prompt"]
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig

    def request(self, seed: int, row: int, max_position: int, index: int) -> Request:
        """Return the request for one of the prompts; the prompts must have no padding.

        Args:
            row: row of a batch, which determines the random numbers, as the seed does.
        """
        _refuse_other_decoding(self.config, self.processors)
        stop, processors = StopRule(self.criteria, self.input_ids.device), self.processors
        if any(isinstance(one, GrammarProcessor) for one in processors):
            length = self.input_ids.shape[1]
            processors = LogitsProcessorList(_of_sequence(p, stop, length) for p in processors)
        # A criterion of the caller replaces that of the config.
        longest = int(self.config.max_length) if stop.max_length is None else stop.max_length
        longest = max(longest, self.input_ids.shape[1] + 1)  # criteria are called after a token
        check_length(self.input_ids.shape[1], longest, max_position, index)
        return Request(
            token_ids=self.input_ids[min(index, len(self.input_ids) - 1)].tolist(),
            sampling=Sampling(processors, bool(self.config.do_sample), seed, row),
            stop=stop,
            max_length=longest,
        )


def prepare_requests(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    generation: Mapping[str, Any] | None = None,
    *,
    temperature: float | int | None = None,
    seed: int | Sequence[int] | None,
    max_position: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    first_row: int = 0,
) -> tuple[list[Request], GenerationConfig]:
    """Return a request for each prompt, and the generation config that the requests share.

    This function also checks the caller's arguments. Every prompt is prepared by itself, as in a
    batch of one, so that processors and criteria that count tokens never count padding.

    Args:
        temperature: 0 for greedy decoding, a positive number for sampling; None to leave this
            to `generation` and the target's generation config.
        seed: seed of all random numbers, or one seed per prompt, which then gets the random numbers
            of the first row; None for a random seed.
        first_row: row of a batch whose random numbers the first prompt gets; the others get those
            of the next rows.
    """
    if not prompts:
        raise PromptError("there is no prompt to decode")
    temperature = float(temperature) if type(temperature) is int else temperature
    generation = generation or {}
    _refuse_arguments(temperature, generation)
    arguments = dict(generation)
    if temperature is not None:
        arguments.setdefault("do_sample", bool(temperature))
    if temperature:
        arguments.setdefault("temperature", temperature)
    if (grammar := arguments.pop("grammar", None)) is not None:
        processor = GrammarProcessor.compile(grammar, needed(tokenizer))
        others = arguments.get("logits_processor") or ()
        arguments["logits_processor"] = LogitsProcessorList([*others, processor])
    distinct = {tuple(ids): None for ids in prompts}
    prepared = {ids: prepare(model, ids, tokenizer, **arguments) for ids in distinct}
    handovers = [prepared[tuple(ids)] for ids in prompts]
    refuse_several(len(handovers), handovers[0].processors)
    seeds = random_seed() if seed is None else seed
    rows = range(first_row, first_row + len(handovers))
    keys = [(seeds, row) for row in rows] if isinstance(seeds, int) else [(s, 0) for s in seeds]
    if len(keys) != len(handovers):
        expected = f"one seed, or {len(handovers)} seeds"
        raise PromptError("wrong seeds", expected=expected, got=f"{len(keys)} seeds")
    pairs = enumerate(zip(handovers, keys, strict=True))
    requests = [prompt.request(*key, max_position, index) for index, (prompt, key) in pairs]
    return requests, handovers[0].config


def prepare(
    model: CausalLM,
    token_ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase | None = None,
    **generation: Any,
) -> Handover:
    """Return the arguments with which `model.generate(token_ids, **generation)` would decode.

    Processors, stopping criteria and defaults are prepared by transformers' own `generate()`, so
    that `generate()` and this package's decode loop select tokens from the same distribution.
    """
    ids = torch.tensor([list(token_ids)], device=model.device)
    arguments = _with_stop_strings(model, _with_padding(model, generation), tokenizer)
    try:
        prepared = capture(model, ids, torch.ones_like(ids), **arguments)
    except (ImportError, TypeError, ValueError) as error:
        raise PromptError(
            "generate() of transformers rejects the arguments",
            got=error,
            remedy="use its names and values, such as max_new_tokens (not max_tokens) and "
            "stop_strings (not stop)",
        ) from error
    if prepared.config.num_return_sequences not in (1, None):
        raise PromptError(
            "num_return_sequences is not supported by this method",
            remedy="use generate_batch([prompt] * n), or target.generate(custom_generate=decoder)",
        )
    return prepared


def capture(
    model: CausalLM, input_ids: Tensor, attention_mask: Tensor | None, **generation: Any
) -> Handover:
    """Return the arguments that `model.generate(input_ids, ...)` passes to a decoding method.

    Args:
        input_ids: token ids of all prompts, padded, shape [batch, prompt].
        attention_mask: 0 where `input_ids` is padding, shape [batch, prompt]; None if there is no
            padding.
    """
    generate: Any = model.generate
    prepared: Handover = generate(
        input_ids, attention_mask=attention_mask, custom_generate=_capture, **generation
    )
    return prepared


def random_seed() -> int:
    """Return a seed from torch's own generator, which `torch.manual_seed` makes repeatable."""
    return int(torch.randint(1 << 62, (1,)))


def _refuse_arguments(temperature: float | None, generation: Mapping[str, Any]) -> None:
    """Raise an error if an argument is unusable or not supported."""
    if temperature == 0 and generation.get("do_sample"):
        raise PromptError(
            "do_sample=True needs a temperature above 0",
            remedy="for greedy decoding, leave do_sample out",
        )
    if refused := sorted(name for name in REFUSED if generation.get(name) is not None):
        raise PromptError(
            f"arguments are not supported: {', '.join(refused)}", remedy="leave them out"
        )


def _refuse_other_decoding(config: GenerationConfig, processors: Iterable[object]) -> None:
    """Raise an error if a config requests unsupported decoding, or a processor keeps a state."""
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise PromptError(f"{mode.value} is not supported", remedy="leave its options out")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name):
            raise PromptError(f"{name} is not supported", remedy="leave it out")
    for name in (type(processor).__name__ for processor in processors):
        if name in _STATEFUL:
            raise PromptError(
                f"{name} is not supported, because it keeps a state between tokens",
                remedy="leave it or its options out",
            )


def refuse_several(num_sequences: int, processors: Iterable[object]) -> None:
    """Raise an error if there are several sequences, but a processor supports only one."""
    names = {type(processor).__name__ for processor in processors}
    if num_sequences > 1 and "PrefixConstrainedLogitsProcessor" in names:
        raise PromptError(
            "prefix_allowed_tokens_fn is not supported for several sequences at once",
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


def _of_sequence(processor: LogitsProcessor, stop: StopRule, prompt_length: int) -> LogitsProcessor:
    """Return the processor; that of a grammar for one sequence, which then ends with its text."""
    if not isinstance(processor, GrammarProcessor):
        return processor
    grammar = processor.for_sequence(prompt_length, stop.eos_ids)
    stop.others.append(GrammarEnd(grammar))
    return grammar


def _capture(
    model: CausalLM,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **model_kwargs: Any,
) -> Handover:
    """Stand in for a decoding method: decode nothing, and return the arguments."""
    return Handover(model, input_ids, logits_processor, stopping_criteria, generation_config)


def _with_padding(model: CausalLM, generation: dict[str, Any]) -> dict[str, Any]:
    """Set a pad token if there is none, only to prevent a warning of `generate()`."""
    config = model.generation_config
    is_given = generation.keys() & {"generation_config", "pad_token_id"}
    if is_given or config is None or config.pad_token_id is not None:
        return generation
    return generation | {"pad_token_id": next(iter(end_ids(config)), 0)}


def _with_stop_strings(
    model: CausalLM, generation: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, Any]:
    """Replace stop strings by a criterion, because a custom method receives no tokenizer.

    Those of the target's own generation config count unless the caller gives others; None and an
    empty list switch them off.
    """
    config = generation.get("generation_config")
    default = getattr(model.generation_config, "stop_strings", None)
    strings = getattr(config, "stop_strings", None) or default
    strings = generation.get("stop_strings", strings)
    if not strings:
        return generation | {"stop_strings": None} if default else generation
    strings = list(dict.fromkeys([strings] if isinstance(strings, str) else strings))
    if "" in strings:
        raise PromptError("a stop string is empty")
    criterion = StopStringCriteria(needed(tokenizer), strings)
    criteria = StoppingCriteriaList([*(generation.get("stopping_criteria") or ()), criterion])
    rest = {key: value for key, value in generation.items() if key != "stop_strings"}
    if config is not None and config.stop_strings:
        rest["generation_config"] = copy(config)
        rest["generation_config"].stop_strings = None
    if default:  # only an argument replaces a value of the target's own config
        rest["stop_strings"] = None
    return {**rest, "stopping_criteria": criteria}
