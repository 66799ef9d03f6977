"""What TensorBoard shows: numbers and histograms."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from training.evaluation.diversity import NUM_BINS
from training.evaluation.metrics import Journal, read_evaluations


def test_the_board_has_scalars_and_histograms(tmp_path: Path) -> None:
    counts = [[0] * (NUM_BINS - 1) + [3], [4] + [0] * (NUM_BINS - 1)]
    found = {"experts": {"top_overlap": None, "gate_histogram": counts, "mean_gate": [0.1, 0.9]}}
    journal = Journal(tmp_path, 0)
    journal.write(0, {"evaluation": found})
    journal.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    tags = board.Tags()
    assert sorted(tags["scalars"]) == [f"evaluation/experts/mean_gate/{one}" for one in (1, 2)]
    assert sorted(tags["histograms"]) == [f"evaluation/experts/gate/{one}" for one in (1, 2)]
    value = board.Histograms("evaluation/experts/gate/1")[0].histogram_value
    assert value.num == 3
    assert value.sum == pytest.approx(3 * (1 - 0.5 / NUM_BINS))
    assert read_evaluations(tmp_path) == [(0, found)]
