"""The options of a request in the engine's terms, and the engine's requests with these options."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from inference.engine.request import OutputOptions, Request
from inference.generation.incremental_text import IncrementalText, TextStopRule
from inference.generation.preparation import prepare_requests
from inference.generation.prompts import Prompt, continued_tokens, encode_prompt, needed
from inference.sampling.grammar import GrammarSource
from inference.serving.api_error import ApiError
from inference.serving.tool_calls import grammar_of_call
from jakiro.errors import PromptError

if TYPE_CHECKING:
    from inference.decoder import SpeculativeDecoder

_OF_SAMPLING = frozenset({"top_p", "top_k", "min_p"})


@dataclass(frozen=True)
class DecodingOptions:
    """The options of a request.

    Attributes:
        seed: the continuations get different random numbers, like the sequences of
            `generate_batch`; None for a random seed.
        choices: number of continuations of each prompt.
        max_new_tokens: largest number of new tokens; None for as many as there is room for.
        temperature: 0 for greedy decoding; None for the target's own.
        stops: strings each of which ends a text with the token that completes it.
        frequency_penalty: number to subtract from a token's logit for each of its occurrences in
            the new text.
        presence_penalty: number to subtract from a token's logit if it occurs in the new text.
        grammar: what the text must follow, as for `generate()`.
        tools: tools for the chat template.
        required_calls: names of the functions of which the text must call one, if any.
        others: further arguments of `generate()`.
    """

    seed: int | None = None
    choices: int = 1
    max_new_tokens: int | None = None
    temperature: float | None = None
    stops: Sequence[str] = ()
    record: OutputOptions | None = None
    drafting: bool = True
    may_learn: bool = True
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    grammar: GrammarSource | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    required_calls: Collection[str] = ()
    others: Mapping[str, Any] = field(default_factory=dict)

    def selection(self, samples: bool) -> tuple[float | None, dict[str, Any]]:
        """Return the temperature, and the arguments of `generate()` that have an effect at it."""
        temperature, others = self.temperature, dict(self.others)
        restricts = others.get("top_p", 1) < 1 or others.get("top_k", 0) or others.get("min_p", 0)
        if temperature is None and restricts and not samples:
            temperature = 1.0  # otherwise these options would be ignored
        if temperature == 0:  # the likeliest token stays the same
            others = {name: value for name, value in others.items() if name not in _OF_SAMPLING}
        return temperature, others


def requests_of(
    decoder: "SpeculativeDecoder",
    capacity: int,
    prompt: Prompt,
    options: DecodingOptions,
    *,
    first_row: int = 0,
    is_answer: bool = False,
) -> tuple[list[Request], GenerationConfig]:
    """Return a request for each continuation of a prompt, and the config that they share.

    Args:
        capacity: largest number of tokens of a sequence, including its prompt.
        first_row: as for `prepare_requests`.
        is_answer: whether the tokens of the prompt are those of chat messages.
    """
    target, tokenizer = decoder.target, decoder.tokenizer
    token_ids = encode_prompt(prompt, tokenizer, target.spec.vocab_size, options.tools)
    grammar = options.grammar
    if options.required_calls:
        grammar = grammar_of_call(options.tools, options.required_calls, needed(tokenizer))
    config: Any = target.model.generation_config
    temperature, others = options.selection(bool(config.do_sample))
    requests, config = prepare_requests(
        target.model,
        [token_ids] * options.choices,
        {
            "max_new_tokens": _num_new(len(token_ids), options.max_new_tokens, capacity),
            **others,
            **_processors(len(token_ids), options, target.spec.vocab_size),
            "grammar": grammar,
        },
        temperature=temperature,
        seed=None if options.seed is None else options.seed % 2**63,
        max_position=target.spec.max_position,
        tokenizer=tokenizer,
        first_row=first_row,
    )
    before = () if is_answer else continued_tokens(prompt, token_ids)

    def with_options(request: Request) -> Request:
        stop = request.stop
        if options.stops:
            text = IncrementalText(needed(tokenizer), options.stops, before=before)
            stop = TextStopRule(stop, text)
        return replace(request, stop=stop, record=options.record, drafts=options.drafting)

    return [with_options(request) for request in requests], config


def _num_new(num_prompt_tokens: int, wanted: int | None, capacity: int) -> int:
    """Return the largest number of new tokens; all that there is room for without a wish."""
    room = capacity - num_prompt_tokens
    if room >= (wanted or 1):
        return room if wanted is None else wanted
    raise ApiError(
        400,
        "the prompt and its new tokens are longer than a sequence may be; "
        f"expected: at most {capacity} tokens; "
        f"got: {num_prompt_tokens} prompt tokens and {wanted or 1} new ones; "
        "remedy: shorten the prompt or lower max_tokens",
        code="context_length_exceeded",
    )


def _processors(num_prompt_tokens: int, options: DecodingOptions, size: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if wrong := [token for token in options.logit_bias if token >= size]:
        raise PromptError("logit_bias contains an id outside the vocabulary", got=wrong[0])
    if options.logit_bias:
        arguments["sequence_bias"] = {(token,): bias for token, bias in options.logit_bias.items()}
    penalties = options.frequency_penalty, options.presence_penalty
    if any(penalties):
        processor = TokenPenalties(num_prompt_tokens, *penalties)
        arguments["logits_processor"] = LogitsProcessorList([processor])
    return arguments


class TokenPenalties(LogitsProcessor):
    """Subtracts numbers from the logits of tokens that were generated before.

    A token that occurs n times after the prompt loses `frequency * n`, and `presence` if n > 0.
    Negative numbers favor such tokens. Transformers has no processor with this rule.
    """

    def __init__(self, prompt_length: int, frequency: float = 0.0, presence: float = 0.0) -> None:
        self.prompt_length = prompt_length
        self.frequency = frequency
        self.presence = presence

    def __call__(
        self, input_ids: Int[Tensor, "batch tokens"], scores: Float[Tensor, "batch vocab"]
    ) -> Float[Tensor, "batch vocab"]:
        new = input_ids[:, self.prompt_length :]
        ones = torch.ones_like(new, dtype=scores.dtype)
        counts = torch.zeros_like(scores).scatter_add_(1, new, ones)
        return scores - self.frequency * counts - self.presence * (counts > 0)
