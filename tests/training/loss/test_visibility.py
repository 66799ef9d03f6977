"""When drafting, no trunk sees unverified target states or another document."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from helpers.models import tiny_settings
from helpers.training import (
    ROLLED_OUT,
    TinyTraining,
    batch_for,
    cropped,
    one_document,
    tiny_training,
)
from helpers.variants import FEEDBACK, GRID, HYBRID, NO_FIRST, VARIANTS
from torch import Tensor

from jakiro.drafter_settings import DrafterSettings
from jakiro.target.cache import TargetState
from training.loss.anchors import ttt_anchors
from training.loss.batch import ROOTS_OF_A_GROUP, Batch, TargetView
from training.loss.drafting import draft_all_positions, through_tail
from training.loss.objectives import LossTerms

LENGTH = 24
PASSES = ROLLED_OUT
TTT = {"ttt_steps": PASSES}
TAIL = tiny_settings(combine="sum", parallel_levels=0, tail_layers=2)
FED_BACK = tiny_settings(combine="sum", trunk=FEEDBACK | TTT)
FED_TAIL = tiny_settings(combine="sum", parallel_levels=0, tail_layers=2, trunk=FEEDBACK | TTT)
BOTH = tiny_settings(trunk=HYBRID | TTT)
BOTH_TAIL = tiny_settings(combine="sum", parallel_levels=0, tail_layers=2, trunk=HYBRID | TTT)


@torch.no_grad()
def drafted(tiny: TinyTraining, view: TargetView, batch: Batch) -> Tensor:
    """Return the features, after the tail if there is one, [samples, batch, length, ...]."""
    outputs = list(draft_all_positions(tiny.drafter, view, batch, tiny.reader(LENGTH).tail))
    return torch.stack([output.features for output in outputs])


def moved(part: Tensor, index: int, dim: int = 1) -> Tensor:
    """Return a copy that differs at one position."""
    other = part.clone()
    other.select(dim, index).add_(1.0)
    return other


def with_tokens(view: TargetView, index: int) -> TargetView:
    return view._replace(embeddings=moved(view.embeddings, index))


def with_state(view: TargetView, index: int) -> TargetView:
    parts = (None if part is None else moved(part, index) for part in view.state)
    return view._replace(state=TargetState(*parts))


def with_tail_kv(view: TargetView, index: int) -> TargetView:
    return view._replace(tail_kv=tuple(moved(part, index, dim=2) for part in view.tail_kv))


def token_reaches(batch: Batch, index: int) -> Tensor:
    """Return a mask [samples, batch, length] of a document's positions from `index` on."""
    same = batch.documents == batch.documents[:, index, None]
    reached = same & (torch.arange(LENGTH) >= index)
    return reached.expand(batch.anchors.shape[1], -1, -1)


def anchored_beyond(batch: Batch, index: int) -> Tensor:
    """Return a mask [samples, batch, length] of positions with an anchor at or after `index`."""
    same = batch.documents == batch.documents[:, index, None]
    return ((batch.anchors >= index) & same[:, None]).transpose(0, 1)


def feature_reaches(batch: Batch, index: int) -> Tensor:
    """Return a mask of the positions that see a feature of the target or drafts based on it.

    At distance k, position i sees features of the target up to its anchor i - k. If that index is
    in another document, the anchor is the position itself, which then has no loss.
    """
    same = batch.documents == batch.documents[:, index, None]
    distance = torch.arange(1, PASSES + 1)[:, None, None]
    return same & (torch.arange(LENGTH) - distance >= index)


CASES: dict[str, tuple[DrafterSettings, Callable[..., TargetView], Callable[..., Tensor]]] = {
    "moa, tokens": (tiny_settings(), with_tokens, token_reaches),
    "moa, memory": (tiny_settings(), with_state, anchored_beyond),
    "tail, tokens": (TAIL, with_tokens, token_reaches),
    "tail, memory": (TAIL, with_state, anchored_beyond),
    "tail, keys and values of the target": (TAIL, with_tail_kv, anchored_beyond),
    "feedback, tokens": (FED_BACK, with_tokens, token_reaches),
    "feedback, features": (FED_BACK, with_state, feature_reaches),
    "hybrid, tokens": (BOTH, with_tokens, token_reaches),
    "hybrid, memory and features": (BOTH, with_state, feature_reaches),
    "feedback with a tail, features": (FED_TAIL, with_state, feature_reaches),
    "feedback with a tail, keys and values": (FED_TAIL, with_tail_kv, feature_reaches),
}


@cache
def _unchanged(settings: DrafterSettings) -> tuple[TinyTraining, Batch, TargetView, Tensor]:
    """Return a drafter, a batch, the target's outputs, and the features drafted from them."""
    tiny = tiny_training(settings)
    batch = batch_for(settings, [10, 11], [24])
    view = tiny.view(batch)
    return tiny, batch, view, drafted(tiny, view, batch)


@pytest.mark.parametrize("index", [5, 20])
@pytest.mark.parametrize("name", CASES)
def test_a_change_reaches_the_positions_that_may_see_it_and_no_others(
    name: str, index: int
) -> None:
    settings, change, reaches = CASES[name]
    tiny, batch, view, before = _unchanged(settings)
    after = drafted(tiny, change(view, index), batch)
    got = (before != after).flatten(start_dim=3).any(dim=-1)  # exact comparison
    has_loss = (torch.arange(LENGTH) > batch.anchors).transpose(0, 1) & (batch.documents >= 0)
    assert torch.equal(got & has_loss, reaches(batch, index) & has_loss)
    assert (got & has_loss).any()


@pytest.mark.parametrize("name", ["block", "block-recurrent"])
def test_a_block_does_not_depend_on_the_other_roots_of_its_sequence(name: str) -> None:
    length, few = 3 * ROOTS_OF_A_GROUP, [1, 2, 40, 41, 70]
    tiny = tiny_training(VARIANTS[name])
    all_roots = ttt_anchors(np.zeros(length, dtype=np.int64), 1)
    batch = one_document(torch.randint(0, 61, (1, length)), torch.from_numpy(all_roots))
    index = torch.arange(length)
    is_root = torch.isin(index, torch.tensor(few))
    sparse = replace(batch, anchors=torch.where(is_root, batch.anchors, index))
    view = tiny.view(batch)
    together, alone = (drafted(tiny, view, each)[:, :, few] for each in (batch, sparse))
    torch.testing.assert_close(together, alone)


FIRST = {
    "moa": tiny_settings(trunk=NO_FIRST),
    "tail": tiny_settings(combine="sum", parallel_levels=0, tail_layers=2, trunk=NO_FIRST),
    "feedback": tiny_settings(combine="sum", trunk=FEEDBACK | TTT | NO_FIRST),
    "hybrid with a tail": tiny_settings(
        combine="sum", parallel_levels=0, tail_layers=2, trunk=HYBRID | TTT | NO_FIRST
    ),
}


@pytest.mark.parametrize("start", [0, 10])
@pytest.mark.parametrize("name", FIRST)
def test_without_the_first_position_the_first_token_of_each_document_reaches_no_other(
    name: str, start: int
) -> None:
    tiny, batch, view, before = _unchanged(FIRST[name])
    after = drafted(tiny, with_tokens(view, start), batch)
    changed = (before != after).flatten(start_dim=3).any(dim=-1)
    has_loss = (torch.arange(LENGTH) > batch.anchors).transpose(0, 1) & (batch.documents >= 0)
    has_loss &= batch.positions[:, start, None] == 0  # sequences where a document begins there
    assert not (changed & has_loss).any()
    # The target's state at that position is still read.
    after = drafted(tiny, with_state(view, start), batch)
    changed = (before != after).flatten(start_dim=3).any(dim=-1)
    assert (changed & has_loss).any()


@pytest.mark.parametrize("name", FIRST)
def test_without_the_first_position_gradients_are_finite(name: str) -> None:
    tiny, batch, *_ = _unchanged(FIRST[name])
    for gradient in tiny.gradients(tiny.loss(batch).total):
        assert gradient is None or gradient.isfinite().all()


@pytest.mark.parametrize("distance", range(1, PASSES + 1))
def test_a_rollout_reads_the_target_up_to_its_anchor_and_drafts_from_there(distance: int) -> None:
    tiny = tiny_training(FED_BACK)
    batch = batch_for(FED_BACK, [LENGTH])
    view = tiny.view(batch)
    before = drafted(tiny, view, batch)[distance - 1, 0]
    for index in range(LENGTH - distance):
        after = drafted(tiny, with_state(view, index), batch)[distance - 1, 0]
        changed = (before != after).flatten(start_dim=1).any(dim=-1)
        assert changed.nonzero()[0].item() == index + distance


def test_the_tail_sees_the_targets_or_the_predicted_keys_and_values_never_both() -> None:
    """The tail attends to predicted states only after the anchor."""
    tiny = tiny_training(TAIL)
    batch = batch_for(TAIL, [LENGTH])
    view, tail = tiny.view(batch), tiny.reader(LENGTH).tail
    assert tail is not None
    (output, *_) = draft_all_positions(tiny.drafter, view, batch)
    indices, anchors = torch.arange(LENGTH), batch.anchors[0, 0]
    for index in (3, 9, 15):
        other = output._replace(features=moved(output.features, index))
        before, after = (
            through_tail(own, tail, view, batch, 0).features.detach() for own in (output, other)
        )
        changed = (before != after).flatten(start_dim=2).any(dim=-1)[0]
        expected = (indices == index) | ((indices > index) & (anchors < index))
        assert torch.equal(changed, expected)


def assert_isolated(settings: DrafterSettings) -> None:
    """Check that documents have the same drafts and losses in one sequence as alone."""
    tiny = tiny_training(settings)
    batch = batch_for(settings, [9, 7, 5])
    together = drafted(tiny, tiny.view(batch), batch)
    whole, parts, begin = tiny.loss(batch), [], 0
    for length in (9, 7, 5):
        alone = cropped(batch, begin, begin + length)
        alone = Batch(**(vars(alone) | {"anchors": alone.anchors - begin}))
        got = together[:, :, begin : begin + length]
        # Rounding errors grow with each pass of a rollout through a tail.
        close = {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(got, drafted(tiny, tiny.view(alone), alone), **close)
        inside = batch.documents == batch.documents[:, begin, None]
        only = Batch(**(vars(batch) | {"is_response": batch.is_response & inside}))
        assert_close(tiny.loss(only), tiny.loss(alone))
        parts.append(tiny.loss(alone, contrast_weight=0.0, balance_weight=0.0))
        begin += length
    # Contrast and balance are computed over whole sequences; all other terms add up.
    for name in ("token", "feature", "correct", "level_count", "num_positions"):
        summed = sum(getattr(part, name) for part in parts)
        torch.testing.assert_close(getattr(whole, name), summed, rtol=1e-4, atol=1e-4)


def assert_close(one: LossTerms, other: LossTerms) -> None:
    for name, a, b in zip(LossTerms._fields, one, other, strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-4, atol=1e-4, msg=lambda text, n=name: f"{n} {text}"
        )


ISOLATED = {
    "block": VARIANTS["block"],
    "masks-path": VARIANTS["masks-path"],
    "tail": TAIL,
    "feedback": FED_BACK,
    "hybrid": BOTH,
    "hybrid with a tail": BOTH_TAIL,
    "feedback, mixture": tiny_settings(trunk=FEEDBACK | TTT, parallel_levels=2),
    **{name: VARIANTS[name] for name in ("E2-mixture-P2", "hidden", "draft-vocabulary")},
}


@pytest.mark.parametrize(
    "name",
    [
        # Quick cases cover feedback and a mixture of experts separately.
        pytest.param(name, marks=pytest.mark.slow)
        if name in {"feedback, mixture", "hidden"}
        else name
        for name in ISOLATED
    ],
)
def test_documents_of_a_sequence_are_drafted_and_scored_as_if_alone(name: str) -> None:
    assert_isolated(ISOLATED[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in GRID if name != "block-dspark"])
def test_documents_are_isolated_in_all_combinations(name: str) -> None:
    assert_isolated(GRID[name])
