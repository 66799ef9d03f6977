"""Drafters differ by their kinds, their settings and their weights."""

from typing import Any

import torch
from helpers.models import tiny_drafter, tiny_llama

from inference.drafters.delegating import DelegatingDrafter
from inference.drafters.identity import identity_of
from inference.drafters.lookup import LookupDrafter, LookupSettings
from inference.drafters.small_lm import SmallLMDrafter, SmallLMSettings
from inference.drafters.trained.drafter import TrainedDrafter
from jakiro.target.adapter import TargetAdapter


def _trained(seed: int = 0) -> TrainedDrafter:
    target = TargetAdapter(tiny_llama())
    return TrainedDrafter.for_target(tiny_drafter(target, seed=seed), target)


def test_the_same_drafter_has_the_same_identity() -> None:
    assert identity_of(_trained()) == identity_of(_trained())
    assert identity_of(LookupDrafter()) == identity_of(LookupDrafter())


def test_another_weight_is_another_drafter() -> None:
    drafter = _trained()
    before = identity_of(drafter)
    with torch.no_grad():
        next(drafter.model.parameters()).view(-1)[0] += 0.5
    assert identity_of(drafter) != before
    assert identity_of(_trained(seed=1)) != before


def test_other_settings_are_another_drafter() -> None:
    small: Any = tiny_llama(seed=1)
    kinds = [
        LookupDrafter(),
        LookupDrafter(LookupSettings(num_nodes=3, depth=3)),
        DelegatingDrafter(LookupDrafter()),
        SmallLMDrafter(small, small),
        SmallLMDrafter(small, small, SmallLMSettings(depth=2)),
        SmallLMDrafter(tiny_llama(seed=2), small),
    ]
    found = [identity_of(drafter) for drafter in kinds]
    assert all(found.count(own) == 1 for own in found)
