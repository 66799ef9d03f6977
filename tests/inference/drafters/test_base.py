"""Drafters are shown in one line with what matters about them."""

import re
from collections.abc import Callable

import numpy as np
import pytest
from helpers.models import tiny_llama

from inference.drafters.aded.drafter import AdedDrafter
from inference.drafters.aded.index import Successors, TrigramIndex, packed
from inference.drafters.combined.drafter import CombinedDrafter
from inference.drafters.lookup import LookupDrafter
from inference.drafters.repeating import RepeatingDrafter, RepeatSettings
from inference.drafters.small_lm import SmallLMDrafter, SmallLMSettings
from inference.protocol import Drafter


def _lm() -> SmallLMDrafter:
    model = tiny_llama()
    model.name_or_path = "owner/model"
    return SmallLMDrafter(model, tiny_llama(), SmallLMSettings(depth=2, children=2, breadth=1))


def _table() -> TrigramIndex:
    return TrigramIndex(packed(np.array([1, 2]), np.array([2, 3])), Successors.none(2, 1))


LOOKUP_LINE = "LookupDrafter(max_nodes=16, max_depth=8)"
LM_LINE = r"SmallLMDrafter\('owner/model, float32, .* parameters', max_nodes=\d+, max_depth=2\)"


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (LookupDrafter, re.escape(LOOKUP_LINE)),
        (lambda: AdedDrafter(index=_table()), r"AdedDrafter\(.*max_depth=8, known_bigrams=2\)"),
        (_lm, LM_LINE),
        (
            lambda: RepeatingDrafter(LookupDrafter(), RepeatSettings(num_nodes=9)),
            re.escape(f"RepeatingDrafter({LOOKUP_LINE}, max_nodes=9, max_depth=8)"),
        ),
        (
            lambda: CombinedDrafter(_lm(), LookupDrafter()),
            rf"CombinedDrafter\({LM_LINE}, {re.escape(LOOKUP_LINE)}, max_nodes=\d+, max_depth=8\)",
        ),
    ],
    ids=["lookup", "aded", "lm", "repeating", "combined"],
)
def test_the_repr_of_a_drafter_is_one_line(make: Callable[[], Drafter], line: str) -> None:
    assert re.fullmatch(line, repr(make()))
