"""Checks of a draft tree that another machine has sent, each with the name of its fault.

A tree that passes can be verified, whatever its candidates are: they change how many tokens a step
emits, but never the distribution of another session's text.
"""

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from inference.draft_tree import ROOT, CandidateKind, DraftTree, SparseDistribution
from inference.remote.integer_distribution import TOTAL, probabilities
from inference.remote.messages import MessageError, TreeLimits
from inference.remote.tree_frame import TreeTensors


def receive_tree(tree: TreeTensors, limits: TreeLimits, vocab_size: int) -> None:
    """Check the tree of another machine.

    Raises:
        MessageError: the tree cannot be verified; `code` names the fault.
    """
    nodes, (expanded, support) = len(tree.token_ids), tree.weights.shape
    is_even = len(tree.parents) == len(tree.kinds) == nodes and len(tree.expanded) == expanded
    _require(is_even and tree.distribution_ids.shape == tree.weights.shape, "unequal_lengths")
    # A single path, such as text that was written alone, has a limit of its own.
    is_chain = bool((tree.parents == np.arange(nodes) - 1).all())
    most, deepest = (limits.max_chain,) * 2 if is_chain else (limits.max_nodes, limits.max_depth)
    _require(max(nodes, expanded) <= most, "tree_too_large")
    _require(support <= limits.max_support, "support_too_large")
    for ids in (tree.token_ids, tree.distribution_ids):
        _require(((ids >= 0) & (ids < vocab_size)).all(), "token_outside_vocabulary")
    # Parents come before their children, so there is no cycle either.
    earlier = (tree.parents >= ROOT) & (tree.parents < np.arange(nodes))
    _require(earlier.all(), "wrong_parent")
    _require(depths(tree).max(initial=0) <= deepest, "tree_too_deep")
    _require((tree.kinds <= CandidateKind.SAMPLED).all(), "unknown_kind")
    parents = np.unique(tree.parents[tree.kinds == CandidateKind.SAMPLED])
    _require(parents.tolist() == sorted(tree.expanded.tolist()), "wrong_distributions")
    for index in range(expanded):
        _check_distribution(tree, index)


def depths(tree: TreeTensors) -> Int64[np.ndarray, " nodes"]:
    """Return the depth of each node, which is 1 below the root."""
    depth = np.ones(len(tree.parents), np.int64)
    for node, parent in enumerate(tree.parents):
        if parent != ROOT:
            depth[node] = depth[parent] + 1
    return depth


def to_draft_tree(tree: TreeTensors, base_length: Tensor, step_id: int = 0) -> DraftTree:
    """Return a checked tree as the engine verifies it, on the device of `base_length`."""
    count, depth = len(tree.token_ids), depths(tree)
    if not count:
        return DraftTree.empty(base_length, step_id)
    columns = [tree.token_ids, tree.parents, depth, tree.kinds, np.arange(count)]
    fields = torch.from_numpy(np.stack(columns).astype(np.int64)).to(base_length.device)
    token_ids, parent, depth_of, kind, rank = fields[:, None].unbind()
    return DraftTree(
        token_ids=token_ids,
        parent=parent,
        depth=depth_of,
        score=torch.zeros_like(parent, dtype=torch.float32),
        kind=kind,
        rank=rank,
        proposer_id=torch.zeros_like(parent),
        is_valid=torch.ones_like(parent, dtype=torch.bool),
        base_length=base_length,
        max_depth=int(depth.max()),
        max_siblings=int(np.bincount(tree.parents.astype(np.int64) + 1).max()),
        step_id=step_id,
        draft_probs=_distributions(tree, base_length.device) if len(tree.expanded) else None,
    )


def _distributions(tree: TreeTensors, device: torch.device) -> SparseDistribution:
    """Return the distributions below ROOT and all nodes; zeros if no child was sampled."""
    shape = (1, len(tree.token_ids) + 1, tree.weights.shape[1])
    ids, probs = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    cells = tree.expanded.astype(np.int64) + 1
    ids[0, cells] = tree.distribution_ids
    probs[0, cells] = probabilities(tree.weights.astype(np.int64))
    return SparseDistribution(torch.from_numpy(ids).to(device), torch.from_numpy(probs).to(device))


def _check_distribution(tree: TreeTensors, index: int) -> None:
    """Check one distribution, and that the siblings below its node were sampled from it."""
    weights = tree.weights[index].astype(np.int64)
    _require(weights.sum() == TOTAL, "wrong_total")
    support = tree.distribution_ids[index][weights > 0]
    _require(len(np.unique(support)) == len(support), "repeated_token")
    is_sibling = tree.parents == tree.expanded[index]
    siblings = tree.token_ids[is_sibling & (tree.kinds == CandidateKind.SAMPLED)]
    _require(len(np.unique(siblings)) == len(siblings), "duplicate_siblings")
    _require(np.isin(siblings, support).all(), "sibling_outside_distribution")


def _require(is_right: object, code: str) -> None:
    if not is_right:
        raise MessageError(code, f"the draft tree cannot be verified ({code})")
