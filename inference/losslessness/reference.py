"""The target alone, through its own `generate()`: what decoding with a drafter must equal."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from jakiro.target.checks import CausalLM

Tokens = tuple[int, ...]

ROWS = 32  # prefixes that the target reads at once
NEAR_TIE_ULPS = 4  # units in the last place that rounding may move a logit by, in half precision


class Reference:
    """A target's own greedy continuations and exact sampling laws after one prompt.

    Args:
        model: the target.
        prompt_ids: the prompt.
        sampling: arguments of `generate()` that shape the law.
    """

    def __init__(
        self,
        model: CausalLM,
        prompt_ids: Sequence[int],
        sampling: dict[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.prompt_ids = tuple(prompt_ids)
        self.sampling = sampling or {}

    def greedy(self, max_new_tokens: int) -> Tokens:
        """Return the new tokens of `generate(do_sample=False)`."""
        output = self._generate([()], max_new_tokens, do_sample=False)
        return tuple(output.sequences[0, len(self.prompt_ids) :].tolist())

    def greedy_scores(self, prefix: Tokens) -> Float[Tensor, " vocab"]:
        """Return the logits that greedy decoding compares after a prefix, from one forward."""
        output = self._generate([prefix], 1, do_sample=False)
        return output.scores[0][0]

    def distributions(
        self, prefixes: Sequence[Tokens]
    ) -> Iterator[tuple[Tokens, Float[Tensor, " vocab"]]]:
        """Yield each prefix of new tokens and the processed law of the token that follows it."""
        for _, group in groupby(sorted(prefixes, key=len), key=len):
            same_length = list(group)
            for start in range(0, len(same_length), ROWS):
                rows = same_length[start : start + ROWS]
                output = self._generate(rows, 1, do_sample=True, **self.sampling)
                yield from zip(rows, output.scores[0].double().softmax(dim=-1), strict=True)

    def is_at_the_cut(self, prefix: Tokens, token: int) -> bool:
        """Return whether an excluded token could be kept if logits were rounded otherwise."""
        score = float(self.greedy_scores(prefix)[token])
        lift = _Lift(token, 2 * rounding(self.model.dtype, [score]))
        if not lift.amount:
            return False
        processors = LogitsProcessorList([lift])
        lifted = self._generate(
            [prefix], 1, do_sample=True, logits_processor=processors, **self.sampling
        )
        return bool(lifted.scores[0][0, token].isfinite())

    def ends(self, token: int) -> bool:
        """Return whether decoding stops after this token."""
        config = self.model.generation_config
        eos = None if config is None else config.eos_token_id
        return token in (eos if isinstance(eos, list) else [eos])

    def _generate(self, prefixes: Sequence[Tokens], max_new_tokens: int, **arguments: Any) -> Any:
        rows = [self.prompt_ids + prefix for prefix in prefixes]
        ids = torch.tensor(rows, device=self.model.device)
        generate: Any = self.model.generate
        return generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            pad_token_id=0,  # rows are of one length: nothing is padded, but a warning is spared
            output_scores=True,
            return_dict_in_generate=True,
            **arguments,
        )


class _Lift(LogitsProcessor):
    """Raises the logits of a token and of all that are not likelier, before any cut."""

    def __init__(self, token: int, amount: float) -> None:
        self.token = token
        self.amount = amount

    def __call__(self, _input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + self.amount * (scores <= scores[:, self.token, None])


def rounding(dtype: torch.dtype, logits: Sequence[float]) -> float:
    """Return what rounding can move the largest of some logits by; 0 in single precision.

    Other shapes of a batch are summed in another order. In half precision this moves logits by
    units in the last place, so that tokens closer than that have no order of their own.
    """
    if torch.finfo(dtype).bits > 16:
        return 0.0
    largest = max(abs(logit) for logit in logits)
    _, exponent = math.frexp(largest)
    return NEAR_TIE_ULPS * torch.finfo(dtype).eps * 2.0 ** (exponent - 1)
