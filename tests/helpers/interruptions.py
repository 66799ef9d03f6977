"""Interrupts a training run in this process right after one of its checkpoints."""

from typing import Any

import pytest

from training.loop.checkpoint import Checkpoints


class PowerCutError(Exception):
    """A simulated power cut."""


def interrupt_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Make runs stop with a `PowerCutError` as soon as the checkpoint of `step` is written."""
    save = Checkpoints.save

    def save_and_die(self: Checkpoints, engine: Any, state: Any) -> None:
        save(self, engine, state)
        if state.step == step:
            raise PowerCutError

    monkeypatch.setattr(Checkpoints, "save", save_and_die)
