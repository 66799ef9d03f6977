"""Metrics of a run in TensorBoard: scalars and histograms."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from training.evaluation.diversity import NUM_BINS
from training.evaluation.metrics import MetricsLog, read_evaluations, read_metrics


def test_the_board_has_scalars_and_histograms(tmp_path: Path) -> None:
    counts = [[0] * (NUM_BINS - 1) + [3], [4] + [0] * (NUM_BINS - 1)]
    found = {"experts": {"top_overlap": None, "gate_histogram": counts, "mean_gate": [0.1, 0.9]}}
    log = MetricsLog(tmp_path, 0)
    log.write(0, {"evaluation": found})
    log.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    tags = board.Tags()
    assert sorted(tags["scalars"]) == [
        f"evaluation/experts/mean_gate/{number}" for number in (1, 2)
    ]
    assert sorted(tags["histograms"]) == [f"evaluation/experts/gate/{number}" for number in (1, 2)]
    value = board.Histograms("evaluation/experts/gate/1")[0].histogram_value
    assert value.num == 3
    assert value.sum == pytest.approx(3 * (1 - 0.5 / NUM_BINS))
    assert read_evaluations(tmp_path) == [(0, found)]


def test_damaged_lines_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = (b'{"step": 1}', b'{"step": 2', b"\xff\xfe", b"[]", b'{"step": "x"}', b'{"step": 3}')
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines) + b'\n{"step": 4')
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 3]
    assert "left out 4 damaged lines" in caplog.text
