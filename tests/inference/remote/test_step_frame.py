"""Submitted trees as bytes: they are always the same, and every change on the way is noticed."""

import pytest
from helpers.remote import LIMITS, VOCAB, mixed, sequence_tree, tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.draft_tree import ROOT
from inference.remote.errors import MessageError
from inference.remote.received_tree import receive_tree
from inference.remote.step_frame import decode_step, encode_step
from inference.remote.tree_tensors import TreeTensors

TREE = sequence_tree(mixed())
BODY = encode_step(2, 6, TREE).body


def _lists(tree: TreeTensors) -> list[object]:
    return [tensor.tolist() for tensor in tree]


def test_a_tree_arrives_as_it_was_sent() -> None:
    received = decode_step(BODY)
    assert (received.header.base_length, received.header.root) == (2, 6)
    assert received.header.digest == encode_step(2, 6, TREE).digest
    assert _lists(received.tree) == _lists(mixed())
    receive_tree(received.tree, LIMITS, VOCAB)


def test_the_same_tree_has_the_same_bytes() -> None:
    assert encode_step(2, 6, sequence_tree(mixed())) == encode_step(2, 6, TREE)


def test_a_chosen_tree_of_60_nodes_takes_less_than_a_kilobyte_beside_its_header() -> None:
    chain = sequence_tree(tensors([1] * 60, [ROOT, *range(59)]))
    assert len(encode_step(2, 6, chain).body) < 1400


def test_a_changed_token_is_noticed() -> None:
    changed = bytearray(BODY)
    changed[-1] ^= 1
    with pytest.raises(MessageError) as found:
        decode_step(bytes(changed))
    assert found.value.code == "wrong_digest"


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
