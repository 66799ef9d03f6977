"""Measured times are kept for a target, so that trees for a seed stay the same."""

from pathlib import Path

import pytest
from helpers.models import tiny_llama

from inference.autotune.measurement import kept
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.settings import Settings


class Figure(Settings):
    """A measured number."""

    value: int


def test_each_target_and_key_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "inference.autotune.measurement.user_cache_path", lambda _: tmp_path / "new"
    )
    usual, other = TargetAdapter(tiny_llama()), TargetAdapter(tiny_llama(hidden_size=16))
    values = iter(range(9))

    def figure(target: TargetAdapter, key: str) -> int:
        return kept(Figure, target, [key], lambda: Figure(value=next(values))).value

    asked = [(usual, "a"), (usual, "b"), (other, "a"), (usual, "a")]
    assert [figure(target, key) for target, key in asked] == [0, 1, 2, 0]
    usual.fuse()  # steps take another time
    assert figure(usual, "a") == 3
