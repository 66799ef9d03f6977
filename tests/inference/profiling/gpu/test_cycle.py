"""A cycle visits every token, on the host and on the device."""

import torch

from inference.profiling.gpu.cycle import Cycle


def test_a_cycle_visits_every_token_once() -> None:
    cycle = Cycle(50, torch.device("cpu"))
    tokens = cycle.following(7, 50)
    assert sorted(tokens) == list(range(50))
    assert tokens[-1] == 7


def test_levels_on_the_device_are_the_following_tokens() -> None:
    cycle = Cycle(50, torch.device("cpu"))
    levels = cycle.levels(torch.tensor([[3], [4]]), 5)
    assert levels.tolist() == [cycle.following(3, 5), cycle.following(4, 5)]
