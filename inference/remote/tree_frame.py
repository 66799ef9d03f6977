"""The draft tree of one sequence as bytes, and the checks of a tree that another machine has sent.

The bytes stay the same however often they are sent. A tree that passes the checks can be verified,
whatever its candidates are: they change how many tokens a step emits, but never the distribution of
another session's text. Each fault has a name.
"""

from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int16, Int32, Int64, UInt8, UInt16
from torch import Tensor

from inference.draft_tree import (
    ROOT,
    CandidateKind,
    DraftTree,
    SequenceTree,
    SparseDistribution,
)
from inference.remote.messages import (
    MessageError,
    StepHeader,
    TensorSpec,
    TreeLimits,
    decode_frame,
    encode_frame,
)
from inference.sampling.integer_distribution import TOTAL, probabilities

_SPECS = {
    "token_ids": TensorSpec(np.int32, 1),
    "parents": TensorSpec(np.int16, 1),
    "kinds": TensorSpec(np.uint8, 1),
    "expanded": TensorSpec(np.int16, 1),
    "distribution_ids": TensorSpec(np.int32, 2),
    "weights": TensorSpec(np.uint16, 2),
}


class TreeTensors(NamedTuple):
    """A tree whose parents come before their children, and sampled siblings in order of sampling.

    The weights of a distribution sum to `TOTAL`; ids whose weight is 0 are padding.
    """

    token_ids: Int32[np.ndarray, " nodes"]
    parents: Int16[np.ndarray, " nodes"]  # index of a node, or ROOT
    kinds: UInt8[np.ndarray, " nodes"]  # CandidateKind
    expanded: Int16[np.ndarray, " expanded"]  # nodes with sampled children, or ROOT
    distribution_ids: Int32[np.ndarray, "expanded m"]  # distribution of these children
    weights: UInt16[np.ndarray, "expanded m"]

    @classmethod
    def of(cls, tree: SequenceTree) -> "TreeTensors":
        """Return the valid candidates of a tree."""
        nodes = _ordered(tree)
        new_index = {ROOT: ROOT} | {node: index for index, node in enumerate(nodes)}
        sampled = {node for siblings in tree.sampled.values() for node in siblings}
        kinds = [
            CandidateKind.SAMPLED if n in sampled else CandidateKind.DETERMINISTIC for n in nodes
        ]
        pairs = [integer_distribution(tree, parent) for parent in tree.sampled]
        ids, weights = zip(*pairs, strict=True) if pairs else (np.empty((0, 0)), np.empty((0, 0)))
        return cls(
            np.array([tree.token_ids[node] for node in nodes], np.int32),
            np.array([new_index[tree.parent[node]] for node in nodes], np.int16),
            np.array(kinds, np.uint8),
            np.array([new_index[parent] for parent in tree.sampled], np.int16),
            np.array(ids, np.int32),
            np.array(weights, np.uint16),
        )

    def digest(self, base_length: int, root: int) -> str:
        """Return the digest of a submitted tree, as 32 hexadecimal digits."""
        digest = blake2b(f"{base_length} {root}".encode(), digest_size=16)
        for tensor in self:
            digest.update(f" {tensor.dtype.str} {tensor.shape} ".encode())
            digest.update(np.ascontiguousarray(tensor).data)
        return digest.hexdigest()


class SubmittedTree(NamedTuple):
    """A draft tree on its way to the server."""

    body: bytes
    digest: str


class ReceivedStep(NamedTuple):
    """A draft tree that has arrived as it was sent; its content has not been checked."""

    header: StepHeader
    tree: TreeTensors


def encode_step(base_length: int, root: int, tree: SequenceTree) -> SubmittedTree:
    tensors = TreeTensors.of(tree)
    digest = tensors.digest(base_length, root)
    header = StepHeader(base_length=base_length, root=root, digest=digest)
    return SubmittedTree(encode_frame(header, tensors._asdict()), digest)


def decode_step(body: bytes) -> ReceivedStep:
    header, tensors = decode_frame(body, StepHeader, _SPECS)
    tree = TreeTensors(**tensors)
    if tree.digest(header.base_length, header.root) != header.digest:
        raise MessageError("wrong_digest", "the tree was changed on its way")
    return ReceivedStep(header, tree)


def integer_distribution(tree: SequenceTree, parent: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids and integer weights that children of `parent` were sampled from."""
    ids, probs = tree.draft_distribution(parent)
    shares = probs.double().cpu().numpy() * TOTAL
    if (shares % 1).any() or shares.sum() != TOTAL:
        raise ValueError("a draft distribution must be quantized before it is sampled from")
    return ids.cpu().numpy(), shares.astype(np.int64)


def _ordered(tree: SequenceTree) -> list[int]:
    """Return the valid nodes level by level; sampled siblings come first, in order of sampling."""
    nodes: list[int] = []
    level = [ROOT]
    while level:
        level = [
            node
            for parent in level
            for by_kind in (tree.sampled, tree.deterministic)
            for node in by_kind.get(parent, ())
        ]
        nodes += level
    return nodes


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


def to_draft_tree(tree: TreeTensors, base_length: Tensor) -> DraftTree:
    """Return a checked tree as the engine verifies it, on the device of `base_length`."""
    count, depth = len(tree.token_ids), depths(tree)
    if not count:
        return DraftTree.empty(base_length)
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
