"""Drafters differ by their kinds, their settings, their tables and their weights."""

import numpy as np
import torch
from helpers.models import tiny_drafter, tiny_llama

from inference.drafters.aded.drafter import AdedDrafter
from inference.drafters.aded.table import TrigramIndex
from inference.drafters.combined.drafter import CombinedDrafter
from inference.drafters.delegating import DelegatingDrafter
from inference.drafters.lookup import LookupDrafter, LookupSettings
from inference.drafters.trained.drafter import TrainedDrafter
from inference.loading import identity_of
from jakiro.target.adapter import TargetAdapter


def _trained(seed: int = 0) -> TrainedDrafter:
    target = TargetAdapter(tiny_llama())
    return TrainedDrafter.for_target(tiny_drafter(target, seed=seed), target)


def test_another_weight_is_another_drafter() -> None:
    drafter = _trained()
    before = identity_of(drafter)
    with torch.no_grad():
        next(drafter.model.parameters()).view(-1)[0] += 0.5
    assert identity_of(drafter) != before
    assert identity_of(_trained(seed=1)) != before


def _index(key: int = 1, token: int = 2, weight: float = 0.5) -> TrigramIndex:
    ids, weights = np.array([[token]], np.int32), np.array([[weight]], np.float32)
    return TrigramIndex(np.array([key], np.int64), ids, weights)


def test_another_table_is_another_drafter() -> None:
    tables = [None, _index(), _index(key=2), _index(token=3), _index(weight=1.0)]
    drafters = [DelegatingDrafter(AdedDrafter(index=index)) for index in tables]
    others = [LookupDrafter(), LookupDrafter(LookupSettings(num_nodes=9)), AdedDrafter()]
    pairs = [CombinedDrafter(_trained(), second) for second in others]
    found = [identity_of(drafter) for drafter in (*drafters, *others, *pairs)]
    assert all(found.count(own) == 1 for own in found)
    assert identity_of(AdedDrafter(index=_index())) == identity_of(AdedDrafter(index=_index()))
