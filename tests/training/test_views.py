"""A position of a packed row sees its past tokens, verified memory, and nothing else."""

import pytest
import torch
from helpers.training import TinyTraining, cropped, random_batch, tiny_training
from torch import Tensor

from training.batch import Batch
from training.drafting import draft_all_positions
from training.views import TargetView


@pytest.fixture(scope="module")
def tiny() -> TinyTraining:
    return tiny_training()


BATCH = random_batch([10, 11], [24], draws=2)


def features(tiny: TinyTraining, view: TargetView, batch: Batch = BATCH) -> Tensor:
    """Shape [draws, batch, rows, ...]."""
    outputs = draft_all_positions(tiny.drafter, view, batch)
    return torch.stack([output.features for output in outputs]).detach()


def changed_positions(before: Tensor, after: Tensor) -> Tensor:
    """Shape [draws, batch, rows]."""
    return (before != after).flatten(start_dim=3).any(dim=-1)


@pytest.mark.parametrize("place", [3, 12, 20])
def test_tokens_change_only_later_positions_of_their_document(
    tiny: TinyTraining, place: int
) -> None:
    view = tiny.view(BATCH)
    other = view.embeddings.clone()
    other[:, place] += 1.0
    changed = changed_positions(
        features(tiny, view), features(tiny, view._replace(embeddings=other))
    )
    index = torch.arange(24)
    same = BATCH.documents == BATCH.documents[:, place, None]
    assert torch.equal(changed, (same & (index >= place)).expand_as(changed))


@pytest.mark.parametrize("place", [3, 12, 20])
def test_memory_changes_only_positions_whose_anchor_it_does_not_follow(
    tiny: TinyTraining, place: int
) -> None:
    view = tiny.view(BATCH)
    other = view._replace(state=view.state.clone())
    other.state[:, place] += 1.0
    changed = changed_positions(features(tiny, view), features(tiny, other))
    same = BATCH.documents == BATCH.documents[:, place, None]
    visible = (BATCH.anchors >= place) & same[:, None]
    assert torch.equal(changed, visible.transpose(0, 1))


def test_the_target_reads_each_document_as_if_it_were_alone(tiny: TinyTraining) -> None:
    packed = tiny.view(BATCH)
    alone = cropped(Batch(*(part[:1] for part in vars(BATCH).values())), 10, 21)
    view = tiny.view(alone)
    torch.testing.assert_close(packed.features[:1, 10:21], view.features)
    torch.testing.assert_close(packed.state[:1, 10:21], view.state)
