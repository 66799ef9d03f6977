"""Requests from `target.generate(..., custom_generate=decoder)`."""

from collections import Counter
from collections.abc import Iterable, Mapping
from copy import copy
from typing import Any, TypeVar

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from inference.engine.request import Request
from inference.generation.preparation import (
    Handover,
    capture,
    prepare,
    random_seed,
    refuse_several,
)
from inference.generation.prompts import check_ids, unpadded
from inference.sampling.options import PREFIX_FREE
from jakiro.errors import PromptError, TargetMismatch
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.pretrained import end_ids

T = TypeVar("T")

# Arguments that generate() always passes, and that the decode loop replaces with its own values;
# `synced_gpus` must be false.
_EXPECTED = frozenset(
    {"cache", "logits_to_keep", "past_key_values", "position_ids", "synced_gpus", "use_cache"}
)


def requests_of(
    handover: Handover, target: TargetAdapter, seed: int | None, inputs: dict[str, Any]
) -> list[Request]:
    """Return one request per sequence of the batch that `generate()` passes on.

    Args:
        inputs: further inputs, such as the attention mask, which is 0 where there is padding.
    """
    mask = inputs.pop("attention_mask", None)
    _check(handover, target, inputs)
    prompts = unpadded(handover.input_ids, mask)
    for prompt in prompts:
        check_ids(prompt, target.spec.vocab_size)
    _check_positions(inputs.get("position_ids"), prompts)
    refuse_several(len(prompts), handover.processors)
    key = random_seed() if seed is None else seed
    prepared = _prepared(handover, mask, prompts)
    limit = target.spec.max_position
    return [prompt.request(key, index, limit, index) for index, prompt in enumerate(prepared)]


def pad_token_id(config: GenerationConfig) -> int:
    """Return the id of the token that fills up sequences that end early."""
    pad: Any = config.pad_token_id
    if pad is None:
        pad = next(iter(end_ids(config)), None)
    return 0 if pad is None else int(pad)


def _prepared(handover: Handover, mask: Tensor | None, prompts: list[list[int]]) -> list[Handover]:
    """Return each prompt with its processors and criteria.

    Processors and criteria that count tokens would count padding as well, and some processors
    depend on the batch index. In these cases, every prompt is prepared again by itself, with
    the processors and criteria that the caller passed.
    """
    width, processors = handover.input_ids.shape[1], handover.processors
    is_padded = any(len(prompt) != width for prompt in prompts)
    are_alike = len(prompts) == 1 or all(type(processor) in PREFIX_FREE for processor in processors)
    if not is_padded and are_alike:
        return [handover] * len(prompts)
    config = copy(handover.config)
    config.max_new_tokens = int(config.max_length) - width
    config.max_length = None
    config.num_return_sequences = 1  # the batch already contains all sequences
    config.stop_strings = None  # they are a criterion already
    default = getattr(handover.model.generation_config, "stop_strings", None)
    options: dict[str, Any] = {"generation_config": config}
    options |= {"stop_strings": None} if default else {}  # only an argument replaces the target's
    built = capture(handover.model, handover.input_ids, mask, **options)
    given: dict[str, Any] = {
        "logits_processor": LogitsProcessorList(_others(processors, built.processors)),
        "stopping_criteria": StoppingCriteriaList(_others(handover.criteria, built.criteria)),
    }
    return [prepare(handover.model, ids, **options, **given) for ids in prompts]


def _check_positions(positions: Tensor | None, prompts: list[list[int]]) -> None:
    """Raise an error if positions do not number the tokens of each prompt from 0."""
    if positions is None:
        return
    expanded = positions.expand(len(prompts), -1).tolist()
    for prompt, numbers in zip(prompts, expanded, strict=True):
        if sorted(numbers)[-len(prompt) :] != list(range(len(prompt))):
            raise PromptError("these position_ids are not supported", remedy="leave them out")


def _check(handover: Handover, target: TargetAdapter, inputs: Mapping[str, Any]) -> None:
    if handover.model.get_input_embeddings() is not target.model.get_input_embeddings():
        raise TargetMismatch(
            "generate() was called on a model other than the decoder's target",
            remedy="call generate() of the model that was passed to the decoder",
        )
    others = {name for name, value in inputs.items() if value is not None} - _EXPECTED
    if inputs.get("synced_gpus"):
        others.add("synced_gpus")
    if others:
        raise PromptError(f"inputs are not supported: {', '.join(sorted(others))}")


def _others(passed: Iterable[T], built: Iterable[T]) -> list[T]:
    """Return the items of the caller: those in `passed` that were not built from the config."""
    left = Counter(map(_description, built))
    others = []
    for item in passed:
        if left[_description(item)] > 0:
            left[_description(item)] -= 1
        else:
            others.append(item)
    return others


def _description(item: object) -> str:
    return f"{type(item)} {sorted(vars(item).items(), key=str)}"
