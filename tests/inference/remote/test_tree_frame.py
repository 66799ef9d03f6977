"""Trees arrive as they were sent; every change and every fault is noticed by name."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.remote import LIMITS, VOCAB, mixed, sequence_tree, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from inference.draft_tree import ROOT, CandidateKind, DraftTree
from inference.engine.accept import accept_path
from inference.remote.messages import MessageError
from inference.remote.tree_frame import (
    TreeTensors,
    decode_step,
    encode_step,
    receive_tree,
    to_draft_tree,
)
from inference.sampling.integer_distribution import TOTAL

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


@settings(max_examples=300, deadline=None)
@given(body=_mutated())
def test_mutated_trees_are_the_same_tree_or_refused_by_name(body: bytes) -> None:
    try:
        received = decode_step(body)
    except MessageError:
        return
    assert received.header == decode_step(BODY).header
    assert _lists(received.tree) == _lists(mixed())


HALVES = {3: TOTAL // 2, 5: TOTAL // 2}
CHAIN = list(range(ROOT, 4))


def _with(field: str, change: dict[object, int]) -> TreeTensors:
    """Return `mixed` with other entries in one tensor."""
    tree = mixed()
    tensor = getattr(tree, field).copy()
    for index, value in change.items():
        tensor[index] = value
    return tree._replace(**{field: tensor})


FAULTS = {
    "tree_too_large": tensors([1] * 9, [ROOT] * 9),
    "tree_too_deep": tensors([1] * 5 + [2], [*CHAIN, ROOT]),
    "support_too_large": tensors([0], [ROOT], {ROOT: {0: TOTAL} | dict.fromkeys(range(1, 9), 0)}),
    "unequal_lengths": mixed()._replace(kinds=np.zeros(3, np.uint8)),
    "token_outside_vocabulary": _with("token_ids", {2: VOCAB}),
    "wrong_parent": tensors([1, 2, 3], [1, 2, 0]),
    "unknown_kind": _with("kinds", {3: 2}),
    "wrong_distributions": _with("kinds", {3: 1}),
    "wrong_total": _with("weights", {(0, 0): TOTAL}),
    "repeated_token": _with("distribution_ids", {(0, 2): 5}),
    "duplicate_siblings": tensors([3, 3], [ROOT, ROOT], {ROOT: HALVES}),
    "sibling_outside_distribution": tensors([3, 4], [ROOT, ROOT], {ROOT: HALVES}),
}


@pytest.mark.parametrize(
    ("tree", "code"),
    [
        *((tree, code) for code, tree in FAULTS.items()),
        (_with("token_ids", {0: -1}), "token_outside_vocabulary"),
        (_with("distribution_ids", {(1, 2): VOCAB}), "token_outside_vocabulary"),
        (_with("parents", {2: -2}), "wrong_parent"),
        (tensors([3], [ROOT], {ROOT: HALVES, 0: HALVES}), "wrong_distributions"),
        (_with("token_ids", {2: 0}), "sibling_outside_distribution"),  # its weight is 0
    ],
)
def test_a_fault_is_named(tree: TreeTensors, code: str) -> None:
    with pytest.raises(MessageError) as found:
        receive_tree(tree, LIMITS, VOCAB)
    assert found.value.code == code


def test_a_distribution_that_is_sent_twice_is_named() -> None:
    tree = mixed()
    again = [np.concatenate((own, own[:1])) for own in tree[3:]]
    with pytest.raises(MessageError) as found:
        receive_tree(TreeTensors(*tree[:3], *again), LIMITS, VOCAB)
    assert found.value.code == "wrong_distributions"


def test_a_tree_that_passes_is_the_tree_that_was_sent() -> None:
    receive_tree(mixed(), LIMITS, VOCAB)
    tree = to_draft_tree(mixed(), torch.tensor([7]))
    own = tree.sequence_tree()
    assert (own.token_ids, own.parent) == ([3, 5, 2, 4], [ROOT, ROOT, 0, 1])
    assert own.depth == [1, 1, 2, 2]
    assert own.sampled == {ROOT: [0, 1], 0: [2]}
    assert own.deterministic == {1: [3]}
    assert (tree.max_depth, tree.max_siblings) == (2, 2)
    ids, probs = own.draft_distribution(0)
    assert (ids.tolist(), probs.tolist()) == ([2, 7, 0], [1 - 1 / TOTAL, 1 / TOTAL, 0])


def test_a_tree_without_nodes_is_verified_like_a_step_without_drafts() -> None:
    nothing = tensors([], [])
    receive_tree(nothing, LIMITS, VOCAB)
    assert to_draft_tree(nothing, torch.tensor([7])).num_nodes == 0


def test_deterministic_siblings_may_repeat_because_the_second_is_never_accepted() -> None:
    twice = tensors([1, 1], [ROOT, ROOT])
    receive_tree(twice, LIMITS, VOCAB)
    own = to_draft_tree(twice, torch.tensor([0]))
    assert (own.kind == CandidateKind.DETERMINISTIC).all()
    assert replace(own, is_valid=own.is_valid).max_siblings == 2


@st.composite
def _any_tree(draw: st.DrawFn) -> TreeTensors:
    """Return tensors of the right dtypes, mostly of the right lengths, with any content."""
    nodes, expanded, support = (draw(st.integers(0, 3)) for _ in range(3))
    lengths = [draw(st.sampled_from([nodes] * 9 + [2])) for _ in range(2)]

    def ints(dtype: type, shape: tuple[int, ...], *values: int) -> np.ndarray:
        return draw(arrays(dtype, shape, elements=st.sampled_from(values)))

    return TreeTensors(
        ints(np.int32, (nodes,), 0, 1, 2, VOCAB - 1, VOCAB, -1),
        ints(np.int16, (lengths[0],), ROOT, ROOT, 0, 1, 2, 5, -2),
        ints(np.uint8, (lengths[1],), 0, 1, 1, 2),
        ints(np.int16, (expanded,), ROOT, 0, 1, 7, -3),
        ints(np.int32, (expanded, support), 0, 1, 2, VOCAB),
        ints(np.uint16, (expanded, support), 0, TOTAL // 2, TOTAL, 2**16 - 1),
    )


@settings(max_examples=150, deadline=None)
@given(tree=_any_tree())
def test_any_tree_is_refused_by_name_or_can_be_verified(tree: TreeTensors) -> None:
    try:
        receive_tree(tree, LIMITS, VOCAB)
    except MessageError:
        return
    own = to_draft_tree(tree, torch.tensor([0])).sequence_tree()
    uniform = torch.full((VOCAB,), 1 / VOCAB, dtype=torch.float64)
    accepted = accept_path(own, lambda _: uniform, lambda probability: probability > 0)
    assert accepted.next_probs.sum() == pytest.approx(1)


def _chain(length: int) -> TreeTensors:
    return tensors([1] * length, [node - 1 for node in range(length)])


def test_a_single_path_has_a_limit_of_its_own() -> None:
    limits = LIMITS.model_copy(update={"max_chain": 20})
    receive_tree(_chain(20), limits, VOCAB)
    with pytest.raises(MessageError, match="tree_too_large"):
        receive_tree(_chain(21), limits, VOCAB)
    branched = tensors([1] * 20 + [2], [*(node - 1 for node in range(20)), 3])
    with pytest.raises(MessageError, match="tree_too_large"):
        receive_tree(branched, limits, VOCAB)
