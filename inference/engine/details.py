"""Optional details of each emitted token: log-probability, scores and logits."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor
from transformers import GenerationConfig

from inference.engine.acceptance import AcceptResult
from inference.sampling.options import widened


@dataclass(frozen=True)
class OutputOptions:
    """The optional details to return for each emitted token."""

    log_probs: bool = False
    scores: bool = False
    logits: bool = False


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
    return TokenDetails(log_probs, scores, logits)
