"""The rows of a head and the tokens that they stand for are read together."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.eagle3_imports import IDS, LAYERS, planned, six_layer_target
from helpers.imports import assert_drafts_equal, imported
from helpers.published import (
    PublishedEagle3,
    Weights,
    eagle3_config,
    eagle3_weights,
    save_published,
)

from jakiro.errors import CheckpointError


def test_a_draft_vocabulary_that_is_not_sorted_is_sorted_with_its_rows(tmp_path: Path) -> None:
    weights, model = eagle3_weights(), six_layer_target()
    order = torch.randperm(23, generator=torch.Generator().manual_seed(1))
    ids = (torch.arange(23) + weights["d2t"])[order]
    mixed = weights | {
        "d2t": ids - torch.arange(23),
        "lm_head.weight": weights["lm_head.weight"][order],
    }
    drafter = imported(save_published(tmp_path, mixed, eagle3_config(**IDS)), model)
    assert drafter.draft_ids.tolist() == sorted(ids.tolist())
    assert_drafts_equal(drafter, PublishedEagle3(mixed, model, LAYERS), length=3)


def _with_offset(index: int, offset: int) -> Weights:
    weights = eagle3_weights()
    weights["d2t"][index] = offset
    return weights


def _without(name: str) -> Weights:
    return {key: part for key, part in eagle3_weights().items() if key != name}


@pytest.mark.parametrize(
    ("weights", "changes", "message"),
    [
        (_with_offset(3, 60), {}, "d2t with tokens from 0 to 60"),
        (_with_offset(1, int(eagle3_weights()["d2t"][0]) - 1), {}, "the same token twice"),
        (eagle3_weights() | {"t2d": torch.zeros(61).bool()}, {}, "t2d with the tokens of d2t"),
        (eagle3_weights() | {"d2t": torch.zeros(23)}, {}, "integers in d2t"),
        (_without("d2t"), {}, "d2t, or a head for all"),
        (eagle3_weights() | {"lm_head.weight": torch.ones(0, 32)}, {}, "with two dimensions"),
        (eagle3_weights(), {"draft_vocab_size": 24}, "draft_vocab_size 24; got: one for 23"),
        (eagle3_weights(), {"vocab_size": 10**15}, r"t2d of shape \[1000000000000000\]"),
    ],
)
def test_what_cannot_be_imported_is_named(
    weights: Weights, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        planned(tmp_path, weights, eagle3_config(**changes))
