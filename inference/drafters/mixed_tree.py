"""Makes draft trees of what was kept of several sequences' pools: drawn candidates, then chosen."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor
from torch.nn.functional import pad

from inference.draft_tree import ROOT, CandidateKind, DraftTree, SparseLaw, TreeRow
from inference.drafters.pool import Pool


class Kept(NamedTuple):
    """What stays of one sequence's candidates; all that were drawn do."""

    row: TreeRow  # of the first source
    pool: Pool
    values: Float64[np.ndarray, " nodes"]  # of the whole pool
    nodes: Int64[np.ndarray, " kept"]  # ascending; parents are among them


def mixed_tree(rows: Sequence[Kept], first: DraftTree, second_id: int) -> DraftTree:
    """Return trees of two sources' candidates.

    Args:
        rows: of each sequence.
        first: the first source's trees, with the laws that drawn candidates came from.
        second_id: proposer of what the first source does not have.
    """
    count = max(len(one.nodes) for one in rows)
    if count == 0:
        return DraftTree.empty(first.base_length, first.round_id)
    is_drawn = first.laws is not None
    columns = np.stack([_columns(one, is_drawn, second_id, count) for one in rows], axis=1)
    score = np.stack([_scores(one, count) for one in rows])
    device = first.base_length.device
    token_ids, parent, depth, kind, rank, proposer_id, is_valid = torch.from_numpy(columns).to(
        device
    )
    return DraftTree(
        token_ids=token_ids,
        parent=parent,
        depth=depth,
        score=torch.from_numpy(score).to(device),
        kind=kind,
        rank=rank,
        proposer_id=proposer_id,
        is_valid=is_valid.bool(),
        base_length=first.base_length,
        max_depth=int(columns[2].max()),
        max_siblings=max(int(np.bincount(one + 1).max()) for one in columns[1]),
        round_id=first.round_id,
        laws=_laws(first.laws, count),
    )


def _columns(
    one: Kept, is_drawn: bool, second_id: int, count: int
) -> Int64[np.ndarray, "fields nodes"]:
    """Return token, parent, depth, kind, rank, proposer and validity; padding stands at ROOT."""
    pool, nodes = one.pool, one.nodes
    place = np.full(len(pool.token_ids) + 1, ROOT)  # the last one is where ROOT = -1 looks
    place[nodes] = np.arange(len(nodes))
    is_first = nodes < pool.num_first
    proposers = np.full(len(pool.token_ids), second_id)
    proposers[: pool.num_first] = one.row.proposer_id
    fields = np.zeros((7, count), np.int64)
    fields[1], fields[2] = ROOT, 1
    kept = fields[:, : len(nodes)]
    kept[0] = np.array(pool.token_ids, np.int64)[nodes]
    kept[1] = place[np.array(pool.parents, np.int64)[nodes]]
    kept[2] = np.array(pool.depths, np.int64)[nodes]
    drawn = is_first & is_drawn
    kept[3] = np.where(drawn, int(CandidateKind.SAMPLED), int(CandidateKind.DETERMINISTIC))
    kept[4] = _ranks(one, drawn)
    kept[5] = proposers[nodes]
    kept[6] = np.array(pool.is_valid, np.int64)[nodes]
    return fields


def _ranks(one: Kept, drawn: Bool[np.ndarray, " kept"]) -> Int64[np.ndarray, " kept"]:
    """Return the draw order of drawn candidates, the order by value of the others."""
    ranks = np.zeros(len(one.nodes), np.int64)
    ranks[drawn] = np.array(one.row.rank, np.int64)[one.nodes[drawn]]
    chosen = np.flatnonzero(~drawn)
    order = np.argsort(-one.values[one.nodes[chosen]], kind="stable")
    ranks[chosen[order]] = np.arange(len(chosen))
    return ranks


def _scores(one: Kept, count: int) -> Float[np.ndarray, " nodes"]:
    scores = np.full(count, -np.inf, np.float32)
    with np.errstate(divide="ignore"):
        scores[: len(one.nodes)] = np.log(one.values[one.nodes])
    return scores


def _laws(laws: SparseLaw | None, count: int) -> SparseLaw | None:
    """Return laws of ROOT and `count` nodes; nothing was drawn below those that came later."""
    if laws is None:
        return None
    more: int = count + 1 - laws.ids.shape[1]

    def longer(rows: Tensor) -> Tensor:
        return pad(rows, (0, 0, 0, more))

    return SparseLaw(longer(laws.ids), longer(laws.probs))
