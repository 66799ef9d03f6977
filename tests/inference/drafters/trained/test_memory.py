"""The memory that a trained drafter reads, and its identity."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama, tiny_settings

from inference.drafters.combined.drafter import CombinedDrafter
from inference.drafters.lookup import LookupDrafter
from inference.drafters.trained.drafter import TrainedDrafter
from inference.drafters.trained.memory import (
    encoder_fingerprint,
    memory_drafter,
)
from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter

TARGET = TargetAdapter(tiny_llama())


def _drafter(seed: int = 1, **settings: Any) -> JakiroDrafter:
    return tiny_drafter(TARGET, tiny_settings(**settings), seed=seed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_identity_of_the_encoders_is_the_same_in_every_dtype(dtype: torch.dtype) -> None:
    drafter = _drafter(trunk={"kind": "hybrid"})
    assert encoder_fingerprint(deepcopy(drafter).to(dtype)) == encoder_fingerprint(drafter)


def test_only_what_encodes_memory_belongs_to_the_identity() -> None:
    drafter = _drafter()
    known = encoder_fingerprint(drafter)
    with torch.no_grad():
        drafter.trunk.cross_attention.query.weight.neg_()
        drafter.experts.down.neg_()
    assert encoder_fingerprint(drafter) == known
    with torch.no_grad():
        drafter.trunk.cross_attention.key_value.weight[0, 0].neg_()
    assert encoder_fingerprint(drafter) != known


def test_drafters_that_read_other_memory_have_other_identities() -> None:
    feedback = {"kind": "feedback"}
    several = [
        _drafter(),
        _drafter(seed=2),
        _drafter(source="hidden"),
        _drafter(trunk=feedback),
        _drafter(trunk={**feedback, "fusion_layers": (0, 2)}),
        _drafter(trunk={"kind": "hybrid"}),
    ]
    assert len({encoder_fingerprint(own) for own in several}) == len(several)


def test_only_trained_drafters_have_a_memory() -> None:
    own = TrainedDrafter.for_target(_drafter(), TARGET)
    assert memory_drafter(own) is own
    assert memory_drafter(CombinedDrafter(own, LookupDrafter())) is own
    assert memory_drafter(LookupDrafter()) is None
    assert memory_drafter(None) is None
