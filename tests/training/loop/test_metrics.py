"""Metrics of a run in its file and in TensorBoard."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from training.loop.metrics import MetricsLog, read_metrics


def test_the_board_has_all_numbers(tmp_path: Path) -> None:
    evaluation = {"experts": {"top_overlap": None, "mean_gate": [0.1, 0.9]}}
    log = MetricsLog(tmp_path, 0)
    log.write(0, {"evaluation": evaluation})
    log.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    names = [f"evaluation/experts/mean_gate/{number}" for number in (1, 2)]
    assert sorted(board.Tags()["scalars"]) == names
    assert [line["evaluation"] for line in read_metrics(tmp_path)] == [evaluation]


@pytest.mark.parametrize("rest", [b'{"step": 4', b'{"step": 4\n', b"\0\xff\n"])
def test_a_damaged_last_line_is_left_out_also_on_resume(tmp_path: Path, rest: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": 3}\n' + rest)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 3]
    MetricsLog(tmp_path, 3).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 1}\n{"step": 3}\n'
