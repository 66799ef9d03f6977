"""A position of a packed sequence sees its document's past tokens and verified memory only.

Verified memory ends at the position's anchor, which is the last verified position.
"""

import pytest
import torch
from helpers.training import TinyTraining, cropped, random_batch, tiny_training
from torch import Tensor

from training.loss.batch import Batch, TargetView
from training.loss.drafting import draft_all_positions


@pytest.fixture(scope="module")
def tiny() -> TinyTraining:
    return tiny_training()


BATCH = random_batch([10, 11], [24], samples=2)


def features(tiny: TinyTraining, view: TargetView, batch: Batch = BATCH) -> Tensor:
    """Return the drafter's features of shape [samples, batch, length, ...]."""
    outputs = draft_all_positions(tiny.drafter, view, batch)
    return torch.stack([output.features for output in outputs]).detach()


def changed_positions(before: Tensor, after: Tensor) -> Tensor:
    """Return a mask of shape [samples, batch, length] of the features that differ."""
    return (before != after).flatten(start_dim=3).any(dim=-1)


def test_the_target_reads_each_document_as_if_it_were_alone(tiny: TinyTraining) -> None:
    packed = tiny.view(BATCH)
    alone = cropped(Batch(*(part[:1] for part in vars(BATCH).values())), 10, 21)
    view = tiny.view(alone)
    torch.testing.assert_close(packed.features[:1, 10:21], view.features)
    torch.testing.assert_close(packed.state.memory[:1, 10:21], view.state.memory)


NARROW = Batch(**(vars(BATCH) | {"is_narrow": torch.tensor([True, False])}))


@pytest.mark.parametrize("position", [0, 3, 12, 20])
def test_in_a_narrow_sequence_only_tokens_after_the_anchor_are_seen(
    tiny: TinyTraining, position: int
) -> None:
    view = tiny.view(NARROW)
    other = view.embeddings.clone()
    other[:, position] += 1.0
    before = features(tiny, view, NARROW)
    assert before.isfinite().all()  # also where the anchor is the position itself
    changed = changed_positions(
        before, features(tiny, view._replace(embeddings=other), NARROW)
    ).transpose(0, 1)
    index = torch.arange(24)
    same = (NARROW.documents == NARROW.documents[:, position, None])[:, None]
    narrow = same & (index >= position) & ((position > NARROW.anchors) | (index == position))
    assert torch.equal(changed[0], narrow[0])
    assert torch.equal(changed[1], (same[1] & (index >= position)).expand_as(changed[1]))


def test_a_narrow_sequence_still_sees_all_memory_up_to_its_anchor(tiny: TinyTraining) -> None:
    view = tiny.view(NARROW)
    other = view._replace(state=view.state._replace(memory=view.state.memory.clone()))
    other.state.memory[:, 3] += 1.0
    changed = changed_positions(features(tiny, view, NARROW), features(tiny, other, NARROW))
    same = NARROW.documents == NARROW.documents[:, 3, None]
    assert torch.equal(changed, ((NARROW.anchors >= 3) & same[:, None]).transpose(0, 1))


def test_narrow_sequences_are_trained_without_a_nan(tiny: TinyTraining) -> None:
    gradients = tiny.gradients(tiny.loss(NARROW).total)
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)
