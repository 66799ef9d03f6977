"""Recorded functions; CUDA graphs need a GPU."""

import pytest
import torch
from torch import Tensor

from inference.engine.cuda_graph import RecordedFunction


def test_on_a_cpu_the_function_is_called() -> None:
    state = torch.zeros(2)
    function = RecordedFunction(lambda: state.add_(1).clone(), [state], state.device)
    assert [function().tolist() for _ in range(3)] == [[1, 1], [2, 2], [3, 3]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
def test_on_a_gpu_the_recorded_function_starts_from_the_state_before() -> None:
    state = torch.zeros(2, device="cuda")
    function = RecordedFunction(lambda: state.add_(1).clone(), [state], state.device)
    assert [function().tolist() for _ in range(3)] == [[1, 1], [2, 2], [3, 3]]
    assert function._graph is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
def test_on_a_gpu_a_function_that_waits_for_the_host_is_called() -> None:
    state = torch.zeros(2, device="cuda")

    def waiting() -> Tensor:
        return state.add_(1) * state.sum().item()

    function = RecordedFunction(waiting, [state], state.device)
    with pytest.warns(UserWarning, match="cannot be recorded"):
        first = function().tolist()
    assert first == [2, 2]
    assert function().tolist() == [8, 8]
