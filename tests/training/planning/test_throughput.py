"""The `throughput` command, and the parts of a step that it measures."""

import json
from pathlib import Path

import pytest
from helpers.commands import exit_code
from helpers.models import tiny_settings
from helpers.training import batch_for, tiny_run, tiny_training
from helpers.variants import FEEDBACK, FUSED, HYBRID

from jakiro.config import DrafterSettings
from jakiro.utils.settings import dump_settings
from training.planning.parts import flops_of, parts_of

PARTS = ["target", "memory", "trunk", "experts", "head"]


@pytest.fixture
def config(workshop: Path) -> Path:
    file = workshop / "run.yaml"
    file.write_text(
        dump_settings(tiny_run(workshop, batch={"global_batch_size": 4, "micro_batch_size": 2}))
    )
    return file


@pytest.mark.parametrize("kind", ["moa", "hybrid"])
def test_a_run_is_measured_beside_its_parts(
    kind: str, config: Path, workshop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = workshop / "throughput.json"
    arguments = ["--config", str(config), "--set", f"drafter.trunk.kind={kind}", "--out", str(out)]
    assert exit_code("throughput", *arguments, "--steps", "3") == 0
    found = json.loads(out.read_text())
    assert list(found["parts"]) == PARTS
    assert all(part["flops"] > 0 and part["seconds"] > 0 for part in found["parts"].values())
    total = 2 * sum(part["seconds"] for part in found["parts"].values())  # two micro-batches
    assert found["ideal_seconds_per_step"] == pytest.approx(total, rel=0.5)
    assert found["ratio"][1] <= found["ratio"][0] <= found["ratio"][2]
    assert 0 <= found["padding"] < 1
    assert not (workshop / "run").exists()
    assert "of the ideal run's speed" in capsys.readouterr().out
    assert exit_code("throughput", *arguments) == 2


@pytest.mark.parametrize(
    "settings",
    [
        tiny_settings(),
        tiny_settings(combine="sum", trunk=FEEDBACK),
        tiny_settings(trunk=FUSED),
        tiny_settings(trunk=HYBRID),
    ],
    ids=["moa", "feedback", "fused", "hybrid"],
)
def test_parts_do_the_arithmetic_of_the_whole_again_and_again(settings: DrafterSettings) -> None:
    tiny, batch = tiny_training(settings), batch_for(settings, [10, 11], [24])
    reader = tiny.reader(batch.token_ids.shape[1])
    parts = parts_of(tiny.drafter, reader, batch, tiny.objective)
    whole = flops_of(lambda: tiny.loss(batch).total.backward())
    for _ in range(2):
        # No part includes the mixing of the experts' features before they are fed back.
        assert sum(map(flops_of, parts.values())) == pytest.approx(whole, rel=0.005)


def test_tail_layers_are_refused(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ("tail_layers=1", "experts.combine=sum", "schedule.parallel_levels=0")
    overrides = [word for change in changes for word in ("--set", f"drafter.{change}")]
    assert exit_code("throughput", "--config", str(config), *overrides) == 2
    assert "cannot be timed separately" in capsys.readouterr().err
