"""Trees of enormous size are refused by the settings of every drafter."""

import time
from typing import Any

import pytest

from inference.drafters.aded.drafter import AdedSettings
from inference.drafters.combined.knowledge import CombinedSettings
from inference.drafters.lookup import LookupSettings
from inference.drafters.repeating import RepeatSettings
from inference.drafters.small_lm import SmallLMSettings
from inference.trees.limits import MOST_CANDIDATES
from inference.trees.shape import TreeShape
from jakiro.errors import ConfigError
from jakiro.utils.settings import Settings, validate_settings

CLASSES = (
    AdedSettings,
    CombinedSettings,
    LookupSettings,
    RepeatSettings,
    SmallLMSettings,
    TreeShape,
)
SIZES = ("num_nodes", "depth", "children", "breadth", "parallel_levels", "matches", "grafts")


@pytest.mark.parametrize(
    ("cls", "key"), [(cls, key) for cls in CLASSES for key in SIZES if key in cls.model_fields]
)
def test_very_large_trees_are_refused(cls: type[Settings], key: str) -> None:
    with pytest.raises(ConfigError, match=f"'{key}'; expected: .*less than or equal to"):
        validate_settings(cls, {key: 10**9}, source="the trees")


@pytest.mark.parametrize(
    ("cls", "values"),
    [
        (TreeShape, {"children": 4096, "breadth": 4096}),
        (TreeShape, {"children": 64, "breadth": 64, "sampled": True}),
        (SmallLMSettings, {"children": 4096, "breadth": 4096, "num_nodes": 8}),
        (SmallLMSettings, {"children": 64, "breadth": 64}),
    ],
)
def test_levels_that_are_very_large_together_are_refused(
    cls: type[Settings], values: dict[str, Any]
) -> None:
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"expected: .*at most"):
        validate_settings(cls, values, source="the trees")
    assert time.monotonic() - started < 1


def test_the_largest_trees_can_be_set() -> None:
    shape = TreeShape(children=82, breadth=82, num_nodes=MOST_CANDIDATES)
    assert shape.max_nodes == MOST_CANDIDATES
    settings = SmallLMSettings(children=64, breadth=64, num_nodes=MOST_CANDIDATES)
    assert max(settings.shape(sampled).max_nodes for sampled in (False, True)) <= MOST_CANDIDATES
