"""A run's throughput is measured together with that of its parts."""

from pathlib import Path

import pytest
from helpers.training import tiny_run

from jakiro.errors import ConfigError
from training.planning.throughput import measure, summary

PARTS = ["target", "memory", "trunk", "experts", "head"]


@pytest.mark.parametrize("kind", ["moa", "hybrid"])
def test_a_run_is_measured_beside_its_parts(kind: str, workshop: Path) -> None:
    found = measure(tiny_run(workshop, drafter={"trunk": {"kind": kind}}), steps=3)
    assert list(found.parts) == PARTS
    assert all(part.flops > 0 and part.seconds > 0 for part in found.parts.values())
    total = 2 * sum(part.seconds for part in found.parts.values())  # two micro-batches
    assert found.ideal_seconds_per_step == pytest.approx(total, rel=0.5)
    value, low, high = found.ratio
    assert low <= value <= high
    assert 0 <= found.padding < 1
    assert not (workshop / "run").exists()
    assert [line.split()[0] for line in summary(found)[:-2]] == [*PARTS, "step"]


def test_tail_layers_are_refused(workshop: Path) -> None:
    drafter = {"tail_layers": 1, "experts": {"combine": "sum"}, "schedule": {"parallel_levels": 0}}
    with pytest.raises(ConfigError, match="cannot be timed separately"):
        measure(tiny_run(workshop, drafter=drafter), steps=1)
