"""Metrics of a run in its file and in TensorBoard."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from training.evaluation.metrics import MetricsLog, read_evaluations, read_metrics


def test_the_board_has_all_numbers(tmp_path: Path) -> None:
    evaluation = {"experts": {"top_overlap": None, "mean_gate": [0.1, 0.9]}}
    log = MetricsLog(tmp_path, 0)
    log.write(0, {"evaluation": evaluation})
    log.close()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    names = [f"evaluation/experts/mean_gate/{number}" for number in (1, 2)]
    assert sorted(board.Tags()["scalars"]) == names
    assert read_evaluations(tmp_path) == [(0, evaluation)]


def test_the_last_line_of_an_interrupted_run_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 3}\n{"step": 4')
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 3]
