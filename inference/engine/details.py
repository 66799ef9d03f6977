"""Optional details of each emitted token: log-probabilities, likeliest tokens, scores, logits."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import GenerationConfig

from inference.engine.acceptance import AcceptResult
from inference.engine.request import OutputOptions
from inference.sampling.options import widened


def options_for(config: GenerationConfig, log_probs: bool) -> OutputOptions | None:
    """Return which details are requested, or None if no details are requested.

    Args:
        config: generation config, which may request scores and logits.
        log_probs: whether log-probabilities are requested.
    """
    options = OutputOptions(log_probs, bool(config.output_scores), bool(config.output_logits))
    return options if options != OutputOptions() else None


@dataclass(frozen=True)
class TokenDetails:
    """Details of the tokens of one decoding step; a detail that was not requested is empty."""

    log_probs: list[float]  # of each token, under the target's processed distribution
    scores: list[Float[Tensor, " vocab"]]  # processed logits
    logits: list[Float[Tensor, " vocab"]]  # raw logits of the target
    # of each token, under the target's distribution before any processor
    raw_log_probs: list[float] = field(default_factory=list)
    # the likeliest tokens before any processor, each with its log-probability
    likeliest: list[list[tuple[int, float]]] = field(default_factory=list)


def details_of(record: OutputOptions, result: AcceptResult, emitted: list[int]) -> TokenDetails:
    """Return the details of emitted tokens.

    Args:
        record: details to return.
        result: outcome of verifying the tree.
        emitted: tokens of the accepted path and the next token, as far as they were emitted.
    """
    visited = result.visited[: len(emitted)]
    scores, logits, log_probs = [], [], []
    if record.scores:
        scores = [result.distribution.scores(node) for node in visited]
    if record.logits:
        logits = [widened(result.distribution.raw(node)[None])[0] for node in visited]
    if record.log_probs:
        for node, token in zip(visited, emitted, strict=True):
            processed = result.distribution.scores(node).log_softmax(dim=-1)
            log_probs.append(float(processed[token]))
    raw_log_probs, likeliest = _raw(record, result, emitted)
    return TokenDetails(log_probs, scores, logits, raw_log_probs, likeliest)


def _raw(
    record: OutputOptions, result: AcceptResult, emitted: list[int]
) -> tuple[list[float], list[list[tuple[int, float]]]]:
    """Return the raw log-probability of each token, and the likeliest tokens at its position."""
    if not (record.raw_log_probs or record.num_likeliest):
        return [], []
    visited = result.visited[: len(emitted)]
    raw = torch.stack([result.distribution.raw(node) for node in visited])
    log_probs = widened(raw).log_softmax(dim=-1)
    best, token_ids = log_probs.topk(min(record.num_likeliest, log_probs.shape[1]), dim=-1)
    own = log_probs.gather(1, torch.tensor(emitted, device=raw.device)[:, None])[:, 0]
    pairs = zip(token_ids.tolist(), best.tolist(), strict=True)
    likeliest = [list(zip(ids, values, strict=True)) for ids, values in pairs]
    return own.tolist() if record.raw_log_probs else [], likeliest if record.num_likeliest else []
