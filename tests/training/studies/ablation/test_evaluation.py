"""The best value of a swept setting is selected for each arm."""

from collections.abc import Sequence

import pytest
from helpers.comparisons import make_document

from inference.benchmark.document import ComparisonDocument
from training.studies.ablation.evaluation import select_value
from training.studies.ablation.sweep import Sweep


def _document(taus: dict[str, Sequence[float]]) -> ComparisonDocument:
    document = make_document(list(taus), (0.0, 1.0))
    methods = tuple(
        method.model_copy(update={"tau": taus[method.name][[0.0, 1.0].index(method.temperature)]})
        for method in document.methods
    )
    return document.model_copy(update={"methods": methods})


def test_the_highest_geometric_mean_wins_and_the_smallest_of_equals() -> None:
    sweep = Sweep(key="any", values=(0.4, 0.1, 0.2))
    found = select_value("arm", sweep, _document({"0.4": (4, 1), "0.1": (2, 2), "0.2": (1, 4)}))
    assert found.tau == ((4, 2, 1), (1, 2, 4))
    assert found.score == pytest.approx((2, 2, 2))
    assert found.chosen == 0.1
    uneven = select_value("arm", sweep, _document({"0.4": (3, 1), "0.1": (1, 1), "0.2": (2, 2)}))
    assert uneven.chosen == 0.2
