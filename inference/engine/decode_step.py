"""What a decoding step emits for a sequence: tokens, and the details of them that were requested.

The details are log-probabilities, likeliest tokens, logits, and draft trees.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from transformers import GenerationConfig

from inference.draft_tree import ROOT
from inference.engine.acceptance import AcceptResult
from inference.engine.request import OutputOptions
from inference.sampling.options import widened
from jakiro.errors import JakiroError

BONUS = 0  # depth of a bonus or recovered token, which comes from the target itself
TARGET = -1  # proposer of such a token


@dataclass(frozen=True)
class VerifiedTree:
    """The draft tree of one sequence in one decoding step; parents come before their children."""

    root: int  # token before the tree
    token_ids: list[int]
    parents: list[int]  # index of a node, or ROOT
    proposer_ids: list[int]  # expert or drafter that scored the candidate highest
    # probability of each token after its parent, under the target's distribution before any
    # processor
    target_probs: list[float]
    path: list[int]  # accepted nodes, as far as their tokens were emitted
    next_token: int | None  # token after the path; None if the sequence ended before it

    @classmethod
    def of(cls, result: AcceptResult, num_emitted: int) -> "VerifiedTree":
        tree, distribution = result.tree, result.distribution
        nodes = sorted(node for siblings in tree.children.values() for node in siblings)
        index = {ROOT: ROOT, **{node: number for number, node in enumerate(nodes)}}
        parents = [tree.parent[node] for node in nodes]
        token_ids = [tree.token_ids[node] for node in nodes]
        return cls(
            root=distribution.emitted[distribution.length - 1],
            token_ids=token_ids,
            parents=[index[parent] for parent in parents],
            proposer_ids=[tree.proposer_id[node] for node in nodes],
            target_probs=_node_probs(distribution.logits, parents, token_ids),
            path=[index[node] for node in result.path[:num_emitted]],
            next_token=result.next_token if num_emitted > len(result.path) else None,
        )


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


@dataclass(frozen=True)
class DecodeStep:
    token_ids: list[int]
    depths: list[int]  # depth of each token in the draft tree, or BONUS
    finished: bool
    index: int = 0  # index of the request in the run
    details: TokenDetails | None = None  # None if no details were requested
    # expert or drafter that proposed each token, or TARGET
    proposer_ids: list[int] = field(default_factory=list)
    error: JakiroError | None = None  # why the sequence ended too early; None if it did not
    # time at which the tokens were emitted, by `time.monotonic()`
    emitted_at: float = field(default_factory=time.monotonic, compare=False)


def options_for(config: GenerationConfig, log_probs: bool) -> OutputOptions | None:
    options = OutputOptions(log_probs, bool(config.output_scores), bool(config.output_logits))
    return options if options != OutputOptions() else None


class Recorded(NamedTuple):
    record: OutputOptions
    result: AcceptResult
    token_ids: list[int]

    @property
    def visited(self) -> list[int]:
        return self.result.visited[: len(self.token_ids)]

    def processed(self) -> list[Float[Tensor, " vocab"]]:
        record = self.record
        if not (record.scores or record.log_probs):
            return []
        return [self.result.distribution.scores(node) for node in self.visited]

    def raw(self) -> list[Float[Tensor, " vocab"]]:
        return [self.result.distribution.raw(node) for node in self.visited]


def details_of(recorded: Sequence[Recorded]) -> list[TokenDetails]:
    """Return the details of the tokens of several sequences.

    The log-probabilities and token ids of all sequences are copied to the host together.
    """
    scores = [item.processed() for item in recorded]
    most = max(item.record.num_likeliest for item in recorded)
    pairs = zip(recorded, scores, strict=True)
    processed = _table([(item, rows) for item, rows in pairs if item.record.log_probs], 0)
    raw = _table([(item, item.raw()) for item in recorded if _reads_raw(item.record)], most)
    numbers = torch.cat((processed.flatten(), raw.flatten().to(processed.device))).tolist()
    log_probs = iter(numbers[: processed.numel()])
    width = max(raw.shape[1], 1)
    rows = iter(
        numbers[start : start + width] for start in range(processed.numel(), len(numbers), width)
    )
    return [
        _details(item, item_scores, log_probs, rows)
        for item, item_scores in zip(recorded, scores, strict=True)
    ]


def _reads_raw(record: OutputOptions) -> bool:
    return record.raw_log_probs or record.num_likeliest > 0


def _table(
    items: Sequence[tuple[Recorded, list[Tensor]]], num_likeliest: int
) -> Float64[Tensor, "tokens fields"]:
    """Return the log-probability of each token, and the likeliest tokens at its position.

    Each row contains the token's log-probability, those of the likeliest tokens, and their ids.
    """
    logits = [row for _, rows in items for row in rows]
    if not logits:
        return torch.empty(0, 1, dtype=torch.float64)
    token_ids = [token for item, _ in items for token in item.token_ids]
    log_probs = widened(torch.stack(logits)).log_softmax(dim=-1)
    index = torch.tensor(token_ids, device=log_probs.device)[:, None]
    best, best_ids = log_probs.topk(min(num_likeliest, log_probs.shape[1]), dim=-1)
    return torch.cat(
        [item.double() for item in (log_probs.gather(1, index), best, best_ids)], dim=1
    )


def _details(
    item: Recorded, scores: list[Tensor], log_probs: Iterator[float], rows: Iterator[list[float]]
) -> TokenDetails:
    record, count = item.record, len(item.token_ids)
    details = TokenDetails(
        log_probs=list(islice(log_probs, count)) if record.log_probs else [],
        scores=scores if record.scores else [],
        logits=[widened(row[None])[0] for row in item.raw()] if record.logits else [],
        tree=VerifiedTree.of(item.result, count) if record.trees else None,
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


def _node_probs(
    logits: Float[Tensor, "queries vocab"], parents: Sequence[int], token_ids: Sequence[int]
) -> list[float]:
    if not token_ids:
        return []
    distinct = sorted(set(parents))
    log_probs = widened(logits[[parent + 1 for parent in distinct]]).log_softmax(dim=-1)
    rows = [distinct.index(parent) for parent in parents]
    probs: list[float] = log_probs[rows, list(token_ids)].exp().tolist()
    return probs
