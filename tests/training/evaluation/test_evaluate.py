"""A run is evaluated only if there is anything to measure."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from training.config import EvaluationSettings
from training.distributed.processes import Processes
from training.evaluation.evaluate import Evaluation


def _evaluation(num_validation: int, num_prompts: int, **settings: Any) -> Evaluation:
    inputs: Any = SimpleNamespace(
        settings=SimpleNamespace(evaluation=EvaluationSettings(**settings)),
        validation=[None] * num_validation,
        prompts=[[1, 2]] * num_prompts,
    )
    reader: Any = None
    return Evaluation(inputs, reader, Processes(0, 1, torch.device("cpu")))


@pytest.mark.parametrize(
    ("num_validation", "num_prompts", "settings", "expected"),
    [
        (0, 0, {}, False),
        (1, 0, {}, True),
        (0, 1, {}, True),
        (1, 0, {"num_sequences": 0}, False),
        (1, 1, {"num_sequences": 0}, True),
        (0, 1, {"temperatures": ()}, False),
    ],
)
def test_settings_decide_with_the_data_whether_anything_is_measured(
    num_validation: int,
    num_prompts: int,
    settings: dict[str, Any],
    expected: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    evaluation = _evaluation(num_validation, num_prompts, every=3, **settings)
    assert evaluation.has_data == expected
    evaluation.warn_if_nothing_to_measure()
    assert ("there is nothing to evaluate on" in caplog.text) == (not expected)
