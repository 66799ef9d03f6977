"""What can be noted about each emitted token: its log-probability, its scores, its logits."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor
from transformers import GenerationConfig

from inference.engine.acceptance import AcceptResult
from inference.sampling import widened


@dataclass(frozen=True)
class OutputOptions:
    """What to note."""

    log_probs: bool = False
    scores: bool = False
    logits: bool = False


def record_for(config: GenerationConfig, log_probs: bool) -> OutputOptions | None:
    """Return what a config and its caller ask for, or None where it is nothing."""
    record = OutputOptions(log_probs, bool(config.output_scores), bool(config.output_logits))
    return record if record != OutputOptions() else None


@dataclass(frozen=True)
class TokenDetails:
    """What was noted about the tokens of one round; empty where it was not asked for."""

    log_probs: list[float]  # under the target's processed law
    scores: list[Float[Tensor, " vocab"]]  # processed logits
    logits: list[Float[Tensor, " vocab"]]  # the target's own


def details_of(record: OutputOptions, result: AcceptResult, emitted: list[int]) -> TokenDetails:
    """Return the details of tokens that a verdict has let through.

    Args:
        record: what to note.
        verdict: on the tree.
        emitted: the first tokens of its path, or all of them and the next token.
    """
    visited = result.visited[: len(emitted)]
    scores = [result.distribution.scores(node) for node in visited] if record.scores else []
    logits = (
        [widened(result.distribution.raw(node)[None])[0] for node in visited]
        if record.logits
        else []
    )
    log_probs = []
    if record.log_probs:
        pairs = zip(visited, emitted, strict=True)
        pairs_of_log_probs = [
            (result.distribution.scores(node).log_softmax(dim=-1), token) for node, token in pairs
        ]
        log_probs = [float(log_probs_at[token]) for log_probs_at, token in pairs_of_log_probs]
    return TokenDetails(log_probs, scores, logits)
