"""Trees as bytes: always the same, without any loss, and every change on the way is noticed."""

from dataclasses import replace

import pytest
import torch
from helpers.remote import LIMITS, VOCAB, mixed, sequence_tree, tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.draft_tree import ROOT, DraftTree
from inference.remote.integer_distribution import TOTAL
from inference.remote.messages import MessageError
from inference.remote.received_tree import receive_tree, to_draft_tree
from inference.remote.tree_frame import TreeTensors, decode_step, encode_step

TREE = sequence_tree(mixed())
BODY = encode_step(2, 6, TREE).body


def _lists(tree: TreeTensors) -> list[object]:
    return [tensor.tolist() for tensor in tree]


@pytest.mark.parametrize("tree", [mixed(), tensors([], []), tensors([4, 4], [ROOT, 0])])
def test_a_tree_comes_back_as_it_was_sent(tree: TreeTensors) -> None:
    assert _lists(TreeTensors.of(sequence_tree(tree))) == _lists(tree)


def test_invalid_candidates_stay_at_home() -> None:
    whole = to_draft_tree(mixed(), torch.tensor([2]))
    assert _lists(TreeTensors.of(whole.limited(3).sequence_tree()))[:2] == [[3, 5], [ROOT, ROOT]]


def test_sampled_siblings_are_sent_in_the_order_of_sampling() -> None:
    whole = to_draft_tree(mixed(), torch.tensor([2]))
    swapped = replace(whole, rank=torch.tensor([[1, 0, 2, 3]]))
    sent = TreeTensors.of(swapped.sequence_tree())
    assert sent.token_ids.tolist() == [5, 3, 4, 2]
    assert sent.parents.tolist() == [ROOT, ROOT, 0, 1]
    assert sent.expanded.tolist() == [ROOT, 1]


def test_a_distribution_that_is_not_quantized_is_refused() -> None:
    whole = to_draft_tree(mixed(), torch.tensor([2]))
    assert whole.draft_probs is not None
    probs = whole.draft_probs.probs * (1 - 1e-5)
    tree: DraftTree = replace(whole, draft_probs=replace(whole.draft_probs, probs=probs))
    with pytest.raises(ValueError, match="must be quantized"):
        TreeTensors.of(tree.sequence_tree())


def test_the_digest_covers_every_number() -> None:
    tree = mixed()
    digests = {tree.digest(4, 5), tree.digest(4, 6), tree.digest(45, 6)}
    for name, tensor in tree._asdict().items():
        changed = tensor.copy()
        changed.flat[-1] += 1
        digests.add(tree._replace(**{name: changed}).digest(4, 5))
    assert len(digests) == 3 + len(tree)
    assert tree.digest(4, 5) == mixed().digest(4, 5)
    columns = tree._replace(token_ids=tree.token_ids.reshape(-1, 1))  # the same bytes
    assert columns.digest(4, 5) != tree.digest(4, 5)
    assert TOTAL == 2**15  # a changed total changes the protocol


def test_a_tree_arrives_as_it_was_sent() -> None:
    received = decode_step(BODY)
    assert (received.header.base_length, received.header.root) == (2, 6)
    assert encode_step(2, 6, sequence_tree(mixed())) == (BODY, received.header.digest)
    assert _lists(received.tree) == _lists(mixed())
    receive_tree(received.tree, LIMITS, VOCAB)


def test_a_chosen_tree_of_60_nodes_takes_less_than_a_kilobyte_beside_its_header() -> None:
    chain = sequence_tree(tensors([1] * 60, [ROOT, *range(59)]))
    assert len(encode_step(2, 6, chain).body) < 1400


@st.composite
def _mutated(draw: st.DrawFn) -> bytes:
    """Return the bytes of a tree with some of them replaced, removed, repeated or inserted."""
    body = bytearray(BODY)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(body)))
        end = min(start + draw(st.integers(0, 12)), len(body))
        kind = draw(st.sampled_from(["replace", "remove", "repeat", "flip"]))
        if kind == "replace":
            body[start:end] = draw(st.binary(max_size=12))
        elif kind == "remove":
            del body[start:end]
        elif kind == "repeat":
            body[start:start] = body[start:end]
        elif start < len(body):
            body[start] ^= 1 << draw(st.integers(0, 7))
    return bytes(body)


@settings(max_examples=1000, deadline=None)
@given(body=_mutated())
def test_mutated_trees_are_the_same_tree_or_refused_by_name(body: bytes) -> None:
    try:
        received = decode_step(body)
    except MessageError:
        return
    assert received.header == decode_step(BODY).header
    assert _lists(received.tree) == _lists(mixed())
