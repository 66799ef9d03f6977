"""Draft trees after their verification, as plain lists for display."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from inference.draft_tree import ROOT
from inference.engine.acceptance import AcceptResult
from inference.sampling.options import widened


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
            target_probs=_probs(distribution.logits, parents, token_ids),
            path=[index[node] for node in result.path[:num_emitted]],
            next_token=result.next_token if num_emitted > len(result.path) else None,
        )


def _probs(
    logits: Float[Tensor, "queries vocab"], parents: Sequence[int], token_ids: Sequence[int]
) -> list[float]:
    """Return the probability of each token after its parent."""
    if not token_ids:
        return []
    distinct = sorted(set(parents))
    log_probs = widened(logits[[parent + 1 for parent in distinct]]).log_softmax(dim=-1)
    rows = [distinct.index(parent) for parent in parents]
    probs: list[float] = log_probs[rows, list(token_ids)].exp().tolist()
    return probs
