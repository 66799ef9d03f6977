"""Reference of a verification: greedy tokens and distributions of the target's `generate()`."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from jakiro.target.checks import CausalLM
from jakiro.utils.pretrained import end_ids

Tokens = tuple[int, ...]

PREFIX_BATCH = 32  # number of prefixes in a batch
NEAR_TIE_ULPS = 4  # largest rounding effect on half-precision logits, in units in the last place


class Reference:
    """A target's own greedy continuation and exact sampling distributions after a prompt."""

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
        """Return the logits that greedy decoding compares after a prefix, from one forward pass."""
        output = self._generate([prefix], 1, do_sample=False)
        return output.scores[0][0]

    def gap(
        self, prefix: Tokens, first: int | None, second: int | None
    ) -> tuple[float | None, float]:
        """Return the difference between the logits of two tokens, and the effect of rounding on it.

        If there is only one token, the difference is None.
        """
        if first is None or second is None:
            return None, 0.0
        scores = self.greedy_scores(prefix)
        pair = [float(scores[first]), float(scores[second])]
        return abs(pair[0] - pair[1]), rounding(self.model.dtype, pair)

    def distributions(
        self, prefixes: Sequence[Tokens]
    ) -> Iterator[tuple[Tokens, Float[Tensor, " vocab"]]]:
        """Yield each prefix of new tokens and the processed distribution of the next token."""
        for _, group in groupby(sorted(prefixes, key=len), key=len):
            same_length = list(group)
            for start in range(0, len(same_length), PREFIX_BATCH):
                batch = same_length[start : start + PREFIX_BATCH]
                output = self._generate(batch, 1, do_sample=True, **self.sampling)
                yield from zip(batch, output.scores[0].double().softmax(dim=-1), strict=True)

    def is_at_the_cut(self, prefix: Tokens, token: int) -> bool:
        """Return whether an excluded token could be kept if logits were rounded differently."""
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
        """Return whether decoding stops after a token."""
        return token in end_ids(self.model.generation_config)

    def _generate(self, prefixes: Sequence[Tokens], max_new_tokens: int, **arguments: Any) -> Any:
        sequences = [self.prompt_ids + prefix for prefix in prefixes]
        ids = torch.tensor(sequences, device=self.model.device)
        generate: Any = self.model.generate
        return generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            pad_token_id=0,  # avoids a warning; nothing is padded, because all lengths are equal
            output_scores=True,
            return_dict_in_generate=True,
            stop_strings=None,  # verification compares tokens, and decodes without stop strings
            **self._counted_after(len(prefixes[0]), max_new_tokens),
            **arguments,
        )

    def _counted_after(self, length: int, max_new_tokens: int) -> dict[str, Any]:
        """Return the target's own settings that count new tokens, of which a prefix is given."""
        config: Any = self.model.generation_config
        arguments: dict[str, Any] = {}
        if config.min_new_tokens is not None:
            left = max(0, config.min_new_tokens - length)
            arguments["min_new_tokens"] = min(left, max_new_tokens)
        if config.exponential_decay_length_penalty is not None:
            begin, factor = config.exponential_decay_length_penalty
            arguments["exponential_decay_length_penalty"] = (begin - length, factor)
        if config.begin_suppress_tokens is not None and length:
            arguments["begin_suppress_tokens"] = None
        return arguments


class _Lift(LogitsProcessor):
    """Raises the logits of a token and of all tokens that are not more likely than this token."""

    def __init__(self, token: int, amount: float) -> None:
        self.token = token
        self.amount = amount

    def __call__(self, _input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + self.amount * (scores <= scores[:, self.token, None])


def rounding(dtype: torch.dtype, logits: Sequence[float]) -> float:
    """Return the largest effect of rounding on the largest logit; 0 in single precision.

    The order of summation depends on the shape of a batch. In half precision, the order changes
    logits by a few units in the last place. If two logits differ by less than that, either may be
    the larger one.
    """
    if torch.finfo(dtype).bits > 16:
        return 0.0
    largest = max(abs(logit) for logit in logits)
    _, exponent = math.frexp(largest)
    return NEAR_TIE_ULPS * torch.finfo(dtype).eps * 2.0 ** (exponent - 1)
