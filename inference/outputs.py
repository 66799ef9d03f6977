"""What callers get back from a finished generation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from inference.engine.details import OutputOptions
from inference.engine.loop import DecodeRun, DecodeStep
from inference.engine.request import SequenceState
from inference.engine.stats import DecodeStats


@dataclass(frozen=True)
class GenerateOutput:
    """A finished generation.

    Of sequences that were decoded together each has its own counts; the seconds in `stats` are
    those of all of them.
    """

    sequences: Int[Tensor, "1 tokens"]  # prompt and continuation
    new_token_ids: list[int]
    depths: list[int]  # how each new token was won: depth in the draft tree, or 0 by the target
    text: str | None  # of the continuation; None without a tokenizer
    stats: DecodeStats
    log_probs: list[float] | None = None  # of the new tokens under the target's processed law
    scores: tuple[Float[Tensor, " vocab"], ...] | None = None  # processed logits of each
    logits: tuple[Float[Tensor, " vocab"], ...] | None = None  # the target's own


def outputs_of(
    run: DecodeRun, steps: Sequence[DecodeStep], texts: Sequence[str | None]
) -> list[GenerateOutput]:
    """Return the output of each request of a finished run.

    Args:
        run: the run.
        rounds: all that it yielded.
        texts: of each request's new tokens.
    """
    own: list[list[DecodeStep]] = [[] for _ in run.sequences]
    for one in steps:
        own[one.row].append(one)
    record = run.record or OutputOptions()
    return [
        _output(one, own[one.index], text, record, run.seconds)
        for one, text in zip(run.sequences, texts, strict=True)
    ]


def _output(
    one: SequenceState,
    steps: Sequence[DecodeStep],
    text: str | None,
    record: OutputOptions,
    seconds: Mapping[str, float],
) -> GenerateOutput:
    one.stats.seconds.update(seconds)
    details = [item.details for item in steps if item.details is not None]
    return GenerateOutput(
        sequences=torch.tensor([one.token_ids]),
        new_token_ids=one.new_token_ids,
        depths=[depth for item in steps for depth in item.depths],
        text=text,
        stats=one.stats,
        log_probs=[p for item in details for p in item.log_probs] if record.log_probs else None,
        scores=tuple(s for item in details for s in item.scores) if record.scores else None,
        logits=tuple(s for item in details for s in item.logits) if record.logits else None,
    )


def in_transformers_form(
    outputs: Sequence[GenerateOutput],
    input_ids: Int[Tensor, "batch width"],
    pad_token_id: int,
    as_dict: bool,
) -> Int[Tensor, "batch tokens"] | GenerateDecoderOnlyOutput:
    """Return outputs as `generate()` returns them.

    Args:
        outputs: one of each prompt.
        input_ids: the prompts, padded as they came.
        pad_token_id: fills sequences that ended before others.
        as_dict: whether `return_dict_in_generate` was asked for; scores of sequences that have
            ended are 0.
    """
    longest = max(len(one.new_token_ids) for one in outputs)
    new = input_ids.new_full((len(outputs), longest), pad_token_id)
    for row, one in zip(new, outputs, strict=True):
        row[: len(one.new_token_ids)] = torch.tensor(one.new_token_ids)
    sequences = torch.cat((input_ids, new), dim=1)
    if not as_dict:
        return sequences
    fields: dict[str, Any] = {
        "sequences": sequences,
        "scores": _by_step([one.scores for one in outputs]),
        "logits": _by_step([one.logits for one in outputs]),
    }
    return GenerateDecoderOnlyOutput(**fields)


def _by_step(
    rows: Sequence[tuple[Tensor, ...] | None],
) -> tuple[Float[Tensor, "batch vocab"], ...] | None:
    """Return for each new token the vectors of all sequences."""
    given = [row for row in rows if row is not None]
    if not given:
        return None
    ended = torch.zeros_like(given[0][0])
    steps = range(max(map(len, given)))
    return tuple(
        torch.stack([row[step] if step < len(row) else ended for row in given]) for step in steps
    )
