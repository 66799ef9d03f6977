"""Estimates of a study's time and disk space leave no files behind."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from helpers.training import tiny_run
from rich.console import Console

from jakiro.utils.settings import dump_settings
from training.planning import speed
from training.planning.speed import decoding_rate, seconds_per_step
from training.setup.preparation import RunInputs, prepare
from training.studies.ablation import estimate as module
from training.studies.ablation.arms import SizedArm, equally_sized, read_arms
from training.studies.ablation.estimate import ArmEstimate, estimate, render


@pytest.fixture
def study(workshop: Path) -> tuple[list[SizedArm], RunInputs]:
    """Return a base and two arms, with the inputs of the base."""
    base, delta, other = (workshop / f"{name}.yaml" for name in ("a", "experts-1", "parallel-0"))
    base.write_text(
        dump_settings(tiny_run(workshop, drafter={"experts": {"intermediate_size": 256}}))
    )
    delta.write_text("drafter: {experts: {num_experts: 1}}")
    other.write_text("drafter: {schedule: {autoregressive_levels: 3, parallel_levels: 0}}")
    arms = read_arms(base, [delta, other])
    inputs = prepare(arms[0].settings)
    return equally_sized(arms, inputs.drafter_config.target_record), inputs


def with_rates(monkeypatch: pytest.MonkeyPatch, step: float, rate: float) -> None:
    """Replace measured speeds: `step` seconds per step, and `rate` tokens per second."""
    monkeypatch.setattr(module, "seconds_per_step", lambda *_: step)
    monkeypatch.setattr(module, "decoding_rate", lambda _: rate)


def test_steps_and_decoding_are_timed_and_nothing_is_written(
    study: tuple[list[SizedArm], RunInputs], workshop: Path
) -> None:
    sized, inputs = study
    before = sorted(workshop.rglob("*"))
    random_state = torch.random.get_rng_state()
    found = estimate(sized, inputs, seeds=2, evaluation_tokens=100)
    assert [estimated.arm for estimated in found] == [
        "base",
        "experts-1",
        "parallel-0",
        "autoregressive",
    ]
    for estimated, arm in zip(found, sized, strict=False):
        assert estimated.parameters == arm.parameters
        assert 0 < estimated.seconds_per_step < 10
        minutes = 2 * 10 * estimated.seconds_per_step / 60
        assert estimated.training_minutes == pytest.approx(minutes)
    assert found[-1].training_minutes == 0
    assert found[-1].evaluation_minutes == found[0].evaluation_minutes > 0
    assert sorted(workshop.rglob("*")) == before
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert all(p.grad is None for p in inputs.target.model.parameters())


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_step_has_all_its_micro_batches(
    workshop: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def medians(works: dict[str, object], repeats: int) -> dict[str, float]:
        assert repeats > 1
        for work in works.values():
            work()  # type: ignore[operator]
        return {"micro-batch": 2.0, "update": 0.5}

    monkeypatch.setattr(speed, "medians", medians)
    settings = tiny_run(
        workshop, batch={"global_batch_size": 6, "micro_batch_size": 2}, optimizer={"kind": kind}
    )
    assert seconds_per_step(prepare(settings), torch.device("cpu")) == 3 * 2.0 + 0.5


def test_an_end_token_does_not_end_the_timing(workshop: Path) -> None:
    inputs = prepare(tiny_run(workshop))
    everything_ends = list(range(inputs.target.spec.vocab_size - 1))
    inputs.target.model.generation_config.eos_token_id = everything_ends
    assert decoding_rate(inputs) > 0


def test_minutes_and_bytes_are_those_of_all_seeds(
    study: tuple[list[SizedArm], RunInputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    sized, inputs = study
    with_rates(monkeypatch, step=6.0, rate=50.0)
    base, *_, without = estimate(sized, inputs, seeds=3, evaluation_tokens=1000)
    assert base.training_minutes == 3 * 10 * 6 / 60
    assert base.evaluation_minutes == without.evaluation_minutes == 3 * 1000 / 50 / 60
    # A drafter, and two checkpoints (the last and the next) of weights and two moments.
    assert base.disk_bytes == 3 * 4 * base.parameters * (1 + 2 * 3)


def test_a_training_takes_no_longer_than_its_limit(
    study: tuple[list[SizedArm], RunInputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    sized, inputs = study
    with_rates(monkeypatch, step=60.0, rate=1.0)
    limited = [
        replace(
            own,
            arm=replace(own.arm, settings=own.arm.settings.model_copy(update={"minutes": 4.0})),
        )
        for own in sized
    ]
    found = estimate(limited, inputs, seeds=2, evaluation_tokens=100)
    assert [arm.training_minutes for arm in found[:-1]] == [8.0] * len(sized)


def test_a_sweep_trains_and_decodes_more_with_every_arm(
    study: tuple[list[SizedArm], RunInputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    sized, inputs = study
    with_rates(monkeypatch, step=6.0, rate=50.0)
    sweep = {"sweep_runs": 2, "sweep_tokens": 600}
    base, *_, without = estimate(sized, inputs, seeds=3, evaluation_tokens=1000, **sweep)
    assert base.training_minutes == (3 + 2) * 10 * 6 / 60
    assert base.evaluation_minutes == pytest.approx((3 * 1000 + 600) / 50 / 60)
    assert without.evaluation_minutes == 3 * 1000 / 50 / 60
    assert base.disk_bytes == (3 + 2) * 4 * base.parameters * (1 + 2 * 3)


def test_totals_are_shown() -> None:
    def of(arm: str, parameters: int) -> ArmEstimate:
        return ArmEstimate(
            arm=arm,
            parameters=parameters,
            seconds_per_step=1.5,
            training_minutes=90.0,
            evaluation_minutes=2.5,
            disk_bytes=3 * 2**20,
        )

    console = Console(width=80, record=True, file=StringIO())
    console.print(render([of("base", 1000), of("an[arm]", 2000)]))
    lines = console.export_text().splitlines()
    (total,) = [line for line in lines if line.strip().startswith("all")]
    assert total.split() == ["all", "3.0", "h", "5.0", "min", "6", "MiB"]
    assert any("an[arm]" in line and "1.500" in line for line in lines)
