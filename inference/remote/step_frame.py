"""A submitted draft tree as bytes, which stay the same however often they are sent."""

from typing import NamedTuple

from inference.draft_tree import SequenceTree
from inference.remote.errors import MessageError
from inference.remote.frames import decode_frame, encode_frame
from inference.remote.messages import StepHeader
from inference.remote.tree_tensors import SPECS, TreeTensors


class SubmittedTree(NamedTuple):
    """A draft tree on its way to the server."""

    body: bytes
    digest: str


class ReceivedStep(NamedTuple):
    """A draft tree that has arrived; only its form has been checked."""

    header: StepHeader
    tree: TreeTensors


def encode_step(base_length: int, root: int, tree: SequenceTree) -> SubmittedTree:
    """Return a draft tree as bytes."""
    tensors = TreeTensors.of(tree)
    digest = tensors.digest(base_length, root)
    header = StepHeader(base_length=base_length, root=root, digest=digest)
    return SubmittedTree(encode_frame(header, tensors._asdict()), digest)


def decode_step(body: bytes) -> ReceivedStep:
    """Return the draft tree in bytes from another machine."""
    header, tensors = decode_frame(body, StepHeader, SPECS)
    tree = TreeTensors(**tensors)
    digest = tree.digest(header.base_length, header.root)
    if digest != header.digest:
        raise MessageError(
            "wrong_digest", "the tree was changed on its way", expected=digest, got=header.digest
        )
    return ReceivedStep(header, tree)
