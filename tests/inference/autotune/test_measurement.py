"""Measurements are kept on disk, and are repeated later if other processes slowed them down."""

import os
from pathlib import Path

import peft
import pytest
from helpers.models import tiny_llama

from inference.autotune.measurement import cached, target_facts
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.settings import Settings


class Figure(Settings):
    """A measured number."""

    value: float


def test_a_measurement_is_made_once_for_each_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.autotune.measurement.QUIET", float("inf"))
    values = iter([1.0, 2.0])
    folder = tmp_path / "a new user's cache"

    def figure(key: str) -> float:
        return cached(Figure, "figure", [key], lambda: Figure(value=next(values)), folder).value

    assert [figure("a"), figure("b"), figure("a")] == [1.0, 2.0, 1.0]
    assert len(list(folder.iterdir())) == 2


def test_a_measurement_on_a_busy_machine_serves_until_the_machine_is_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = iter([1.0, 2.0, 3.0])

    def figure_of_a_new_process(quiet: float) -> float:
        monkeypatch.setattr("inference.autotune.measurement._in_this_process", {})
        monkeypatch.setattr("inference.autotune.measurement.QUIET", quiet)
        return cached(Figure, "figure", ["a"], lambda: Figure(value=next(values)), tmp_path).value

    busy, quiet = 0.0, float("inf")
    assert figure_of_a_new_process(busy) == 1.0
    assert figure_of_a_new_process(busy) == 1.0
    assert figure_of_a_new_process(quiet) == 1.0  # as it is recent
    (stored,) = tmp_path.iterdir()
    os.utime(stored, (0, 0))
    assert figure_of_a_new_process(quiet) == 2.0
    assert figure_of_a_new_process(busy) == 2.0
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_facts_name_everything_that_changes_the_times_of_a_target() -> None:
    usual, other = TargetAdapter(tiny_llama()), TargetAdapter(tiny_llama())
    assert target_facts(usual) == target_facts(other)
    other.modules.group_heads()
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    adapted = TargetAdapter(peft.get_peft_model(tiny_llama(), config).eval())
    eager = TargetAdapter(tiny_llama())
    eager.config._attn_implementation = "eager"
    for changed in (other, adapted, eager):
        assert target_facts(changed) != target_facts(usual)
        assert changed.spec.fingerprint == usual.spec.fingerprint
