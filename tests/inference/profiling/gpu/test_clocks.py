"""The state of a GPU is read from the output of `nvidia-smi`."""

import torch

from inference.profiling.gpu.clocks import gpu_state, state_of


def test_numbers_are_read_and_other_values_are_kept_as_texts() -> None:
    state = state_of("1980, 2619, 691.18, 64, [N/A], 40211\n")
    assert state == {
        "sm_mhz": 1980,
        "memory_mhz": 2619,
        "watts": 691.18,
        "celsius": 64,
        "busy_percent": "[N/A]",
        "used_mib": 40211,
    }


def test_a_cpu_and_an_empty_output_have_no_state() -> None:
    assert gpu_state(torch.device("cpu")) is None
    assert state_of("\n") is None
