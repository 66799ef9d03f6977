"""Checks of a draft tree that another machine has sent, each with the name of its fault.

A tree that passes can be verified, whatever its candidates are: they change how many tokens a step
emits, but never the distribution of another session's text.
"""

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from inference.draft_tree import ROOT, CandidateKind, DraftTree, SparseDistribution
from inference.remote.errors import MessageError
from inference.remote.integer_distribution import TOTAL, probabilities
from inference.remote.messages import TreeLimits
from inference.remote.tree_tensors import TreeTensors


def receive_tree(tree: TreeTensors, limits: TreeLimits, vocab_size: int) -> None:
    """Check the tree of another machine.

    Raises:
        MessageError: the tree cannot be verified; `code` names the fault.
    """
    _check_sizes(tree, limits)
    _check_ids("token_ids", tree.token_ids, vocab_size)
    _check_parents(tree.parents)
    deepest = limits.max_chain if _is_chain(tree) else limits.max_depth
    if (depth := int(depths(tree).max(initial=0))) > deepest:
        raise _fault("tree_too_deep", f"depth {depth}", f"a depth of at most {deepest}")
    if (tree.kinds > CandidateKind.SAMPLED).any():
        raise _fault("unknown_kind", str(tree.kinds.max()), "0 (deterministic) or 1 (sampled)")
    _check_ids("distribution_ids", tree.distribution_ids, vocab_size)
    _check_expanded(tree)
    for index in range(len(tree.expanded)):
        _check_distribution(tree, index)


def depths(tree: TreeTensors) -> Int64[np.ndarray, " nodes"]:
    """Return the depth of each node, which is 1 below the root."""
    found = np.ones(len(tree.parents), np.int64)
    for node, parent in enumerate(tree.parents):
        if parent != ROOT:
            found[node] = found[parent] + 1
    return found


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


def _check_sizes(tree: TreeTensors, limits: TreeLimits) -> None:
    nodes, support = len(tree.token_ids), tree.weights.shape[1]
    most = limits.max_chain if _is_chain(tree) else limits.max_nodes
    if max(nodes, len(tree.expanded)) > most:
        raise _fault("tree_too_large", f"{nodes} nodes", f"at most {most}")
    if support > limits.max_support:
        raise _fault("support_too_large", f"{support} tokens", f"at most {limits.max_support}")
    is_even = len(tree.parents) == len(tree.kinds) == nodes
    if not (is_even and tree.weights.shape == tree.distribution_ids.shape):
        raise _fault("unequal_lengths", "tensors of different lengths", "one entry for each node")
    if len(tree.weights) != len(tree.expanded):
        got = f"{len(tree.weights)} distributions and {len(tree.expanded)} expanded nodes"
        raise _fault("unequal_lengths", got, "a distribution for each expanded node")


def _is_chain(tree: TreeTensors) -> bool:
    """Return whether the tree is a single path, such as text that was written alone."""
    count = len(tree.parents)
    return count == len(tree.token_ids) and bool((tree.parents == np.arange(count) - 1).all())


def _check_ids(name: str, ids: np.ndarray, vocab_size: int) -> None:
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if len(wrong):
        raise _fault(
            "token_outside_vocabulary", f"{wrong[0]} in {name}", f"ids from 0 to {vocab_size - 1}"
        )


def _check_parents(parents: np.ndarray) -> None:
    """Check that parents come before their children, so that there is no cycle either."""
    wrong = np.flatnonzero((parents < ROOT) | (parents >= np.arange(len(parents))))
    if len(wrong):
        node = int(wrong[0])
        raise _fault(
            "wrong_parent", f"node {node} below {parents[node]}", f"{ROOT} or an earlier node"
        )


def _check_expanded(tree: TreeTensors) -> None:
    """Check that exactly the parents of sampled candidates have a distribution, and one each."""
    parents = np.unique(tree.parents[tree.kinds == CandidateKind.SAMPLED]).tolist()
    expanded = sorted(tree.expanded.tolist())
    if parents != expanded:
        got = f"distributions of {expanded}"
        raise _fault("wrong_distributions", got, f"those of {parents}")


def _check_distribution(tree: TreeTensors, index: int) -> None:
    """Check one distribution, and that the siblings below its node were sampled from it."""
    parent = tree.expanded[index]
    weights = tree.weights[index].astype(np.int64)
    if weights.sum() != TOTAL:
        raise _fault("wrong_total", f"a sum of {weights.sum()}", f"weights that sum to {TOTAL}")
    support = tree.distribution_ids[index][weights > 0]
    if len(np.unique(support)) < len(support):
        raise _fault("repeated_token", f"a token twice below node {parent}", "different tokens")
    siblings = tree.token_ids[(tree.parents == parent) & (tree.kinds == CandidateKind.SAMPLED)]
    if len(np.unique(siblings)) < len(siblings):
        raise _fault("duplicate_siblings", f"siblings {siblings.tolist()}", "different tokens")
    if not np.isin(siblings, support).all():
        raise _fault(
            "sibling_outside_distribution",
            f"siblings {siblings.tolist()}",
            "tokens that were sampled from the distribution",
        )


def _fault(code: str, got: str, expected: str) -> MessageError:
    return MessageError(
        code, f"the draft tree cannot be verified ({code})", expected=expected, got=got
    )
