"""The options of a request in the engine's terms, and penalties of tokens."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessor

from inference.engine.request import OutputOptions
from inference.serving.answers.schema import GenerationBody

_SEEDS = 2**53  # number of seeds to choose from, all of which are exact in JavaScript
_OF_SAMPLING = frozenset({"top_p", "top_k", "min_p"})


@dataclass(frozen=True)
class DecodingOptions:
    """The options of a request.

    Attributes:
        max_new_tokens: largest number of new tokens; None for as many as there is room for.
        temperature: 0 for greedy decoding; None for the target's own.
        frequency_penalty: number to subtract from a token's logit for each of its occurrences in
            the new text.
        presence_penalty: number to subtract from a token's logit if it occurs in the new text.
    """

    seed: int
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
    others: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        body: GenerationBody,
        max_new_tokens: int | None,
        record: OutputOptions | None,
    ) -> "DecodingOptions":
        """Return the options of a request body, with a random seed if it has none."""
        own = body.jakiro
        if body.has_details:
            record = replace(record or OutputOptions(), trees=True)
        others = {"top_p": body.top_p} if body.top_p is not None else {}
        others |= {**(own.selection if own else {}), **body.selection}
        return cls(
            seed=secrets.randbelow(_SEEDS) if body.seed is None else body.seed,
            choices=body.n or 1,
            max_new_tokens=max_new_tokens,
            temperature=body.temperature,
            stops=body.stops,
            record=record,
            drafting=own is None or own.drafting,
            may_learn=body.store is not False,
            logit_bias=body.biases,
            frequency_penalty=body.frequency_penalty or 0.0,
            presence_penalty=body.presence_penalty or 0.0,
            others=others,
        )

    def selection(self, samples: bool) -> tuple[float | None, dict[str, Any]]:
        """Return the temperature, and the arguments of `generate()` that have an effect at it."""
        temperature, others = self.temperature, dict(self.others)
        restricts = others.get("top_p", 1) < 1 or others.get("top_k", 0) or others.get("min_p", 0)
        if temperature is None and restricts and not samples:
            temperature = 1.0  # otherwise these options would be ignored
        if temperature == 0:  # the likeliest token stays the same
            others = {name: value for name, value in others.items() if name not in _OF_SAMPLING}
        return temperature, others


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
        """Return the logits after the penalties."""
        new = input_ids[:, self.prompt_length :]
        ones = torch.ones_like(new, dtype=scores.dtype)
        counts = torch.zeros_like(scores).scatter_add_(1, new, ones)
        return scores - self.frequency * counts - self.presence * (counts > 0)
