"""A schedule names the networks of its parallel levels, if it has such levels."""

import pytest

from jakiro.levels.schedule import ScheduleSettings


@pytest.mark.parametrize("heads", ["experts", "branch", "masks"])
def test_networks_are_named_only_where_there_are_parallel_levels(heads: str) -> None:
    schedule = ScheduleSettings(autoregressive_levels=2, parallel_levels=3, parallel_heads=heads)
    assert (schedule.heads, schedule.depth) == (heads, 5)
    without = ScheduleSettings(autoregressive_levels=2, parallel_heads=heads)
    assert (without.heads, without.depth) == (None, 2)
