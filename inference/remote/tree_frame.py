"""The draft tree of one sequence as bytes, which stay the same however often they are sent."""

from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from jaxtyping import Int16, Int32, UInt8, UInt16

from inference.draft_tree import ROOT, CandidateKind, SequenceTree
from inference.remote.frames import TensorSpec, decode_frame, encode_frame
from inference.remote.integer_distribution import TOTAL
from inference.remote.messages import MessageError, StepHeader

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
    """Return the draft tree in bytes from another machine."""
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
