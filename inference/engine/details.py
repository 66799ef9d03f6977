"""Optional details of emitted tokens: log-probabilities, likeliest tokens, logits, draft trees."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from transformers import GenerationConfig

from inference.engine.acceptance import AcceptResult
from inference.engine.request import OutputOptions
from inference.engine.verified_tree import VerifiedTree
from inference.sampling.options import widened


def options_for(config: GenerationConfig, log_probs: bool) -> OutputOptions | None:
    """Return which details are requested, or None if no details are requested."""
    options = OutputOptions(log_probs, bool(config.output_scores), bool(config.output_logits))
    return options if options != OutputOptions() else None


@dataclass(frozen=True)
class TokenDetails:
    """Details of the tokens of one decoding step; a detail that was not requested is empty."""

    log_probs: list[float]  # one per token, under the target's processed distribution
    scores: list[Float[Tensor, " vocab"]]  # processed logits
    logits: list[Float[Tensor, " vocab"]]  # raw logits of the target
    # log-probability of each token under the target's distribution before any processor
    raw_log_probs: list[float] = field(default_factory=list)
    # the likeliest tokens before any processor, each with its log-probability
    likeliest: list[list[tuple[int, float]]] = field(default_factory=list)
    tree: VerifiedTree | None = None  # draft tree of the step, and what was accepted


class Recorded(NamedTuple):
    """The tokens that one sequence emitted in a decoding step, and the details to return."""

    record: OutputOptions
    result: AcceptResult
    token_ids: list[int]

    @property
    def visited(self) -> list[int]:
        return self.result.visited[: len(self.token_ids)]

    def processed(self) -> list[Float[Tensor, " vocab"]]:
        """Return the processed logits of each token; nothing if they are not needed."""
        record = self.record
        if not (record.scores or record.log_probs):
            return []
        return [self.result.distribution.scores(node) for node in self.visited]

    def raw(self) -> list[Float[Tensor, " vocab"]]:
        return [self.result.distribution.raw(node) for node in self.visited]


def details_of(each: Sequence[Recorded]) -> list[TokenDetails]:
    """Return the details of the tokens of several sequences.

    The log-probabilities and token ids of all sequences are copied to the host together.
    """
    scores = [own.processed() for own in each]
    most = max(own.record.num_likeliest for own in each)
    pairs = zip(each, scores, strict=True)
    processed = _table([(own, rows) for own, rows in pairs if own.record.log_probs], 0)
    raw = _table([(own, own.raw()) for own in each if _reads_raw(own.record)], most)
    numbers = torch.cat((processed.flatten(), raw.flatten().to(processed.device))).tolist()
    own_log_probs = iter(numbers[: processed.numel()])
    width = max(raw.shape[1], 1)
    rows = iter(
        numbers[start : start + width] for start in range(processed.numel(), len(numbers), width)
    )
    return [
        _details(own, own_scores, own_log_probs, rows)
        for own, own_scores in zip(each, scores, strict=True)
    ]


def _reads_raw(record: OutputOptions) -> bool:
    return record.raw_log_probs or record.num_likeliest > 0


def _table(
    several: Sequence[tuple[Recorded, list[Tensor]]], num_likeliest: int
) -> Float64[Tensor, "tokens fields"]:
    """Return the log-probability of each token, and the likeliest tokens at its position.

    Each row contains the token's log-probability, those of the likeliest tokens, and their ids.
    """
    logits = [row for _, rows in several for row in rows]
    if not logits:
        return torch.empty(0, 1, dtype=torch.float64)
    token_ids = [token for own, _ in several for token in own.token_ids]
    log_probs = widened(torch.stack(logits)).log_softmax(dim=-1)
    index = torch.tensor(token_ids, device=log_probs.device)[:, None]
    best, best_ids = log_probs.topk(min(num_likeliest, log_probs.shape[1]), dim=-1)
    return torch.cat([own.double() for own in (log_probs.gather(1, index), best, best_ids)], dim=1)


def _details(
    own: Recorded, scores: list[Tensor], log_probs: Iterator[float], rows: Iterator[list[float]]
) -> TokenDetails:
    record, count = own.record, len(own.token_ids)
    details = TokenDetails(
        log_probs=list(islice(log_probs, count)) if record.log_probs else [],
        scores=scores if record.scores else [],
        logits=[widened(row[None])[0] for row in own.raw()] if record.logits else [],
        tree=VerifiedTree.of(own.result, count) if record.trees else None,
    )
    if not _reads_raw(record):
        return details
    for first, *others in islice(rows, count):
        half = len(others) // 2
        best = zip(map(int, others[half:]), others[:half], strict=True)
        if record.raw_log_probs:
            details.raw_log_probs.append(first)
        if record.num_likeliest:
            details.likeliest.append(list(islice(best, record.num_likeliest)))
    return details
