"""Outputs of a generation, and conversion of these outputs to the types of transformers."""

from collections.abc import Sequence
from dataclasses import dataclass
from reprlib import Repr
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation.utils import GenerateDecoderOnlyOutput

from inference.engine.decode_step import DecodeStep
from inference.engine.loop import DecodeRun
from inference.engine.request import OutputOptions, SequenceState
from inference.engine.stats import DecodeStats
from jakiro.utils.token_text import text_of_tokens

_shortened = Repr()
_shortened.maxstring = 400  # characters


@dataclass(frozen=True, repr=False)
class GenerateOutput:
    """The output for one prompt.

    If several sequences were decoded together, the seconds in `stats` are those of the batch, and
    the counts are those of the sequence.
    """

    sequences: Int[Tensor, "1 tokens"]  # prompt and continuation
    new_token_ids: list[int]
    depths: list[int]  # depth of each new token in its draft tree; 0 for bonus and recovered tokens
    text: str | None  # text of the continuation; None if there is no tokenizer
    stats: DecodeStats
    # Each of these details is None if it was not requested.
    log_probs: list[float] | None = None  # one per new token, under the processed distribution
    scores: tuple[Float[Tensor, " vocab"], ...] | None = None  # processed logits of each new token
    logits: tuple[Float[Tensor, " vocab"], ...] | None = None  # raw logits of each new token

    def __repr__(self) -> str:
        """Return the text, which is shortened if it is long, and the most important statistics."""
        return (
            f"GenerateOutput(text={_shortened.repr(self.text)}, tokens={len(self.new_token_ids)}, "
            f"tau={self.stats.tau:.2f}, tokens_per_second={self.stats.tokens_per_second:.1f})"
        )


def outputs_of(
    run: DecodeRun,
    steps: Sequence[DecodeStep],
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> list[GenerateOutput]:
    by_sequence: list[list[DecodeStep]] = [[] for _ in run.sequences]
    for step in steps:
        by_sequence[step.index].append(step)
    return [output_of(state, by_sequence[state.index], tokenizer, run) for state in run.sequences]


def output_of(
    state: SequenceState,
    steps: Sequence[DecodeStep],
    tokenizer: PreTrainedTokenizerBase | None,
    run: DecodeRun,
) -> GenerateOutput:
    options = state.request.record or run.record or OutputOptions()
    state.stats.seconds.update(run.seconds)
    details = [step.details for step in steps if step.details is not None]
    return GenerateOutput(
        sequences=torch.tensor([state.token_ids]),
        new_token_ids=state.new_token_ids,
        depths=[depth for step in steps for depth in step.depths],
        text=None if tokenizer is None else text_of_tokens(tokenizer, state.new_token_ids),
        stats=state.stats,
        log_probs=[p for item in details for p in item.log_probs] if options.log_probs else None,
        scores=tuple(s for item in details for s in item.scores) if options.scores else None,
        logits=tuple(s for item in details for s in item.logits) if options.logits else None,
    )


def in_transformers_form(
    outputs: Sequence[GenerateOutput],
    input_ids: Int[Tensor, "batch width"],
    pad_token_id: int,
    as_dict: bool,
) -> Int[Tensor, "batch tokens"] | GenerateDecoderOnlyOutput:
    """Return the outputs as `generate()` of transformers returns them.

    Args:
        as_dict: whether to return a `GenerateDecoderOnlyOutput`, as `generate()` does with
            `return_dict_in_generate`; scores and logits after the end of a sequence are 0.
    """
    longest = max(len(output.new_token_ids) for output in outputs)
    new = input_ids.new_full((len(outputs), longest), pad_token_id)
    for padded, output in zip(new, outputs, strict=True):
        padded[: len(output.new_token_ids)] = torch.tensor(output.new_token_ids)
    sequences = torch.cat((input_ids, new), dim=1)
    if not as_dict:
        return sequences
    fields: dict[str, Any] = {
        "sequences": sequences,
        "scores": _by_step([output.scores for output in outputs]),
        "logits": _by_step([output.logits for output in outputs]),
    }
    return GenerateDecoderOnlyOutput(**fields)


def _by_step(
    vectors: Sequence[tuple[Tensor, ...] | None],
) -> tuple[Float[Tensor, "batch vocab"], ...] | None:
    """For each new token, return all sequences' vectors, stacked; None if none were requested."""
    given = [rows for rows in vectors if rows is not None]
    if not given:
        return None
    ended = torch.zeros_like(given[0][0])
    steps = range(max(map(len, given)))
    return tuple(
        torch.stack([rows[step] if step < len(rows) else ended for rows in given]) for step in steps
    )
