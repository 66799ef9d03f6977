"""Turns prompts and keyword arguments into requests, through the target's own `generate()`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)

from inference.engine.request import Request, StopRule
from inference.generation.prompts import needed
from inference.generation.unsupported import (
    check_length,
    refuse_arguments,
    refuse_other_decoding,
    refuse_several,
)
from inference.sampling import Sampling
from jakiro.errors import PromptError
from jakiro.target.checks import CausalLM


@dataclass(frozen=True)
class Prepared:
    """What `generate()` hands to a decoding method."""

    input_ids: Int[Tensor, "batch prompt"]
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig

    def request(self, seed: int, max_position: int, row: int = 0) -> Request:
        """Return the request over one of the prompts, which has no padding.

        Args:
            seed: key of every random number.
            max_position: number of positions that the target has.
            row: of the batch.

        Raises:
            PromptError: the config asks for another kind of decoding, or prompt and continuation
                exceed the context.
        """
        refuse_other_decoding(self.config, self.processors)
        check_length(self.input_ids.shape[1], int(self.config.max_length), max_position, row)
        return Request(
            token_ids=self.input_ids[min(row, len(self.input_ids) - 1)].tolist(),
            sampling=Sampling(self.processors, bool(self.config.do_sample), seed, row),
            stop=StopRule(self.criteria, self.input_ids.device),
            max_length=int(self.config.max_length),
        )


def prepare(
    model: CausalLM,
    token_ids: Sequence[int],
    *,
    temperature: float | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **generation: Any,
) -> Prepared:
    """Return what `model.generate(token_ids, **generation)` would decode.

    Processors, stopping criteria and defaults are prepared by Hugging Face's own `generate()`, so
    both decode the same law.

    Args:
        model: the target.
        token_ids: the prompt.
        temperature: 0 is greedy; a positive one samples; None leaves both to the other arguments
            and the target's generation config.
        tokenizer: finds stop strings.
        **generation: arguments of `generate()`, such as max_new_tokens or top_p.

    Raises:
        PromptError: an argument is out of range, unknown, or cannot be honoured.
    """
    refuse_arguments(temperature, generation)
    ids = torch.tensor([list(token_ids)], device=model.device)
    arguments = _with_stop_strings(_with_padding(model, generation), tokenizer)
    try:
        prepared = capture(model, ids, torch.ones_like(ids), **_decision(temperature), **arguments)
    except (ImportError, TypeError, ValueError) as error:
        raise PromptError("generate() refuses the arguments", got=error) from error
    if (count := prepared.config.num_return_sequences) not in (1, None):
        raise PromptError(
            "num_return_sequences cannot be honoured here",
            expected=1,
            got=count,
            remedy="use generate_batch([prompt] * n), or target.generate(custom_generate=decoder)",
        )
    return prepared


def capture(
    model: CausalLM, input_ids: Tensor, attention_mask: Tensor | None, **generation: Any
) -> Prepared:
    """Return what `model.generate(input_ids, ...)` hands to a decoding method, for all rows."""
    generate: Any = model.generate
    prepared: Prepared = generate(
        input_ids, attention_mask=attention_mask, custom_generate=_capture, **generation
    )
    return prepared


def prepare_requests(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    seed: int | Sequence[int] | None,
    max_position: int,
    **arguments: Any,
) -> tuple[list[Request], GenerationConfig]:
    """Return a request for each prompt, and the config that they share; see `prepare`.

    Every row is prepared alone, so that nothing that counts tokens ever meets padding: a row's
    processors and criteria are those of the same prompt decoded alone.
    """
    distinct = {tuple(ids): None for ids in prompts}
    prepared = {ids: prepare(model, ids, **arguments) for ids in distinct}
    each = [prepared[tuple(ids)] for ids in prompts]
    refuse_several(len(each), each[0].processors)
    key = random_seed() if seed is None else seed
    shared = key if isinstance(key, int) else 0
    requests = [one.request(shared, max_position, row) for row, one in enumerate(each)]
    if not isinstance(key, int):
        requests = _with_own_seeds(requests, key)
    return share_processors(requests), each[0].config


def _with_own_seeds(requests: list[Request], seeds: Sequence[int]) -> list[Request]:
    """Give each row the chance that it has alone with its seed, wherever it stands."""
    if len(seeds) != len(requests):
        raise PromptError(
            "seeds do not fit the prompts",
            expected=f"one seed, or {len(requests)}",
            got=f"{len(seeds)} seeds",
        )
    return [
        replace(one, sampling=replace(one.sampling, seed=seed, batch_index=0))
        for one, seed in zip(requests, seeds, strict=True)
    ]


def share_processors(requests: list[Request]) -> list[Request]:
    """Let rows whose processors look at no prefix have the same ones, to be run on all at once."""
    first = requests[0].sampling
    if not first.is_prefix_free:
        return requests
    return [
        replace(one, sampling=replace(one.sampling, processors=first.processors))
        for one in requests
    ]


def random_seed() -> int:
    """Return a seed from torch's own generator, which `torch.manual_seed` makes repeatable."""
    return int(torch.randint(1 << 62, (1,)))


def _capture(
    model: CausalLM,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **model_kwargs: Any,
) -> Prepared:
    """The decoding method that decodes nothing and returns what it was given."""
    return Prepared(input_ids, logits_processor, stopping_criteria, generation_config)


def _decision(temperature: float | None) -> dict[str, Any]:
    if temperature is None:
        return {}
    return (
        {"do_sample": True, "temperature": float(temperature)}
        if temperature
        else {"do_sample": False}
    )


def _with_padding(model: CausalLM, generation: dict[str, Any]) -> dict[str, Any]:
    """Name a pad token where there is none: one sequence needs no padding, but HF warns."""
    defaults = model.generation_config
    given = generation.get("generation_config") or defaults
    if given is None or "pad_token_id" in generation or given.pad_token_id is not None:
        return generation
    eos = given.eos_token_id
    pad = eos[0] if isinstance(eos, list) and eos else eos
    return {**generation, "pad_token_id": 0 if pad is None else pad}


def _with_stop_strings(
    generation: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, Any]:
    """Turn stop strings into a criterion: `generate()` drops the tokenizer of a custom method."""
    config = generation.get("generation_config")
    strings = generation.get("stop_strings") or getattr(config, "stop_strings", None)
    if not strings:
        return generation
    strings = list(dict.fromkeys([strings] if isinstance(strings, str) else strings))
    if "" in strings:
        raise PromptError("a stop string is empty", expected="at least one character")
    criterion = StopStringCriteria(needed(tokenizer), strings)
    criteria = StoppingCriteriaList([*(generation.get("stopping_criteria") or ()), criterion])
    rest = {key: value for key, value in generation.items() if key != "stop_strings"}
    if config is not None and config.stop_strings:
        rest["generation_config"] = _without_stop_strings(config)
    return {**rest, "stopping_criteria": criteria}


def _without_stop_strings(config: GenerationConfig) -> GenerationConfig:
    fields = config.to_dict()
    fields["stop_strings"] = None
    return GenerationConfig.from_dict(fields)
