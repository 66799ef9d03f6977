"""The version in use is the newest one that fits, and is replaced as a whole or not at all."""

import asyncio
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama

from inference.adaptation.versions import VersionFolder, VersionRecord
from inference.adaptation.weights import adapted_names
from inference.drafters.trained.drafter import TrainedDrafter, default_tree
from inference.serving.learning.used_version import UsedVersion
from inference.serving.telemetry import Telemetry
from jakiro.target.adapter import TargetAdapter

IDENTITY = 32 * "a"


class _Engine:
    """An engine whose idleness is chosen."""

    def __init__(self, is_idle: bool) -> None:
        self.is_idle = is_idle

    def when_idle(self, change: Any) -> "Future[bool]":
        found: Future[bool] = Future()
        try:
            if self.is_idle:
                change()
            found.set_result(self.is_idle)
        except RuntimeError as error:
            found.set_exception(error)
        return found


@pytest.fixture
def drafter() -> TrainedDrafter:
    target = TargetAdapter(tiny_llama())
    model = tiny_drafter(target)
    return TrainedDrafter(model, target, default_tree(model))


@pytest.fixture
def folder(tmp_path: Path, drafter: TrainedDrafter) -> VersionFolder:
    """A folder with version 2, and version 3, whose weights do not fit."""
    found = VersionFolder(tmp_path / IDENTITY, IDENTITY)
    weights = dict(drafter.model.named_parameters())
    fitting = {name: weights[name].detach() + 1 for name in adapted_names(drafter.model)}
    for number, own in ((2, fitting), (3, {"other": torch.ones(2)})):
        record = VersionRecord(
            number=number, parent=0, identity=IDENTITY, tenants=(), before=2, after=3, low=1.1
        )
        found.write(record, own)
    return found


def _used(drafter: TrainedDrafter, folder: VersionFolder, is_idle: bool = True) -> UsedVersion:
    model: Any = SimpleNamespace(fingerprint="own", engine=_Engine(is_idle))
    return UsedVersion(model, drafter, folder, Telemetry())


def _down(drafter: TrainedDrafter) -> torch.Tensor:
    return drafter.model.get_parameter("experts.down").detach().clone()


def test_the_newest_version_that_fits_is_used(
    drafter: TrainedDrafter, folder: VersionFolder
) -> None:
    before = _down(drafter)
    used = _used(drafter, folder)
    assert used.number == 2
    assert used.newest_before(3) == 2
    assert used.newest_before(3, without=[2]) == 0  # as in a purge, before versions are removed
    assert folder.numbers == [2]  # the other one is removed
    assert torch.equal(_down(drafter), before + 1)
    assert used._model.fingerprint.startswith("own_")


def test_the_own_weights_come_back(drafter: TrainedDrafter, folder: VersionFolder) -> None:
    before = _down(drafter)
    used = _used(drafter, folder)
    assert asyncio.run(used.replace(0, used.read(0)))
    assert (used.number, used._model.fingerprint) == (0, "own")
    assert torch.equal(_down(drafter), before)


def test_nothing_changes_while_requests_are_decoded(
    drafter: TrainedDrafter, folder: VersionFolder
) -> None:
    used = _used(drafter, folder, is_idle=False)
    fingerprint, before = used._model.fingerprint, _down(drafter)
    assert not asyncio.run(used.replace(0, None))
    assert (used.number, used._model.fingerprint) == (2, fingerprint)
    assert torch.equal(_down(drafter), before)


def test_after_an_error_the_drafter_has_its_own_weights(
    drafter: TrainedDrafter, folder: VersionFolder
) -> None:
    before = _down(drafter)
    used = _used(drafter, folder)
    version = used.read(2)
    assert version is not None
    version.weights["experts.down"] = torch.ones(7)
    with pytest.raises(RuntimeError):
        asyncio.run(used.replace(2, version))
    assert (used.number, used._model.fingerprint) == (0, "own")
    assert torch.equal(_down(drafter), before)
