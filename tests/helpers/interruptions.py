"""Interruption of a run right after one of its checkpoints, in this process."""

from typing import Any

import pytest

from training.distributed.checkpoint import Checkpoints


class PowerCutError(Exception):
    """Stands for the power cut."""


def interrupt_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Stop the run as soon as the checkpoint of a step is written."""
    save = Checkpoints.save

    def save_and_die(self: Checkpoints, engine: Any, state: Any) -> None:
        save(self, engine, state)
        if state.step == step:
            raise PowerCutError

    monkeypatch.setattr(Checkpoints, "save", save_and_die)
