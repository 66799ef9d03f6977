"""The progress of a run keeps the best evaluation, and is read from the record of a drafter."""

from dataclasses import asdict

from training.distributed.run_state import RunState


def test_the_best_evaluation_is_kept_in_the_state_of_a_run() -> None:
    state = RunState(step=2)
    assert state.add_score("agreement", 0.3)
    state.step = 4
    assert not state.add_score("agreement", 0.3)
    assert (state.best_value, state.best_step, state.num_without_gain) == (0.3, 2, 1)
    state.step = 6
    assert state.add_score("agreement", 0.4)
    assert (state.best_value, state.best_step, state.num_without_gain) == (0.4, 6, 0)
    state.step = 8
    assert state.add_score("tau", 0.1)  # another quantity, with which 0.4 cannot be compared


def test_evaluations_that_a_resumed_run_repeats_do_not_count_as_without_gain() -> None:
    kept = RunState(step=10, best_metric="agreement", best_value=0.4, best_step=10)
    state = RunState(step=5, best_metric="agreement", best_value=0.3, best_step=0)
    state.num_without_gain = 1
    state.add_kept(asdict(kept))
    for step, count in ((8, 0), (10, 0), (12, 1)):
        state.step = step
        assert not state.add_score("agreement", 0.4 if step == 10 else 0.2)
        assert state.num_without_gain == count
    state.add_kept(asdict(RunState(best_metric="agreement", best_value=0.1, best_step=0)))
    state.add_kept(None)
    assert (state.best_value, state.best_step) == (0.4, 10)
