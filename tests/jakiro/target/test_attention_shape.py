"""A trunk inherits the attention geometry of the target's last layer if it can."""

from typing import Any

import pytest
from helpers.families import tiny_family

from jakiro.drafter_settings import TrunkSettings
from jakiro.errors import ConfigError
from jakiro.target.adapter import TargetAdapter
from jakiro.target.attention_shape import AttentionShape

LLAMA3 = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, rope_theta=500_000.0)


@pytest.mark.parametrize(
    ("family", "changes", "heads"),
    [
        ("llama, grouped heads", {"rope_theta": 500_000.0}, (4, 2, 8, 500_000.0)),
        ("llama, wide heads", {}, (4, 2, 12, 10_000.0)),
        ("deepseek_v3", {}, (1, 1, 64, 10_000.0)),  # keys and values differ in size
        ("gpt2", {}, (4, 4, 8, 10_000.0)),
    ],
)
def test_the_geometry_is_read_from_the_target(
    family: str, changes: dict[str, Any], heads: tuple[int, int, int, float]
) -> None:
    attention = TargetAdapter(tiny_family(family, **changes)).spec.attention
    assert tuple(attention.model_dump().values()) == heads


def test_given_settings_stay_and_the_others_are_the_targets() -> None:
    heads = TrunkSettings(num_heads=16, rope_theta=100.0).heads_for(LLAMA3)
    assert heads == LLAMA3.model_copy(update={"num_heads": 16, "rope_theta": 100.0})


def test_a_number_of_heads_that_does_not_fit_the_target_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected: a multiple of 8 heads; got: 12"):
        TrunkSettings(num_heads=12).heads_for(LLAMA3)
