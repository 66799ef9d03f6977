"""The version in use fits and is replaced as a whole; a server that could not learn says so."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import tiny_drafter
from helpers.serving import tiny_decoder
from helpers.variants import VARIANTS

from inference import SpeculativeDecoder
from inference.adaptation.versions import VersionFolder, VersionRecord
from inference.adaptation.weights import adapted_names
from inference.drafters.trained.drafter import TrainedDrafter
from inference.serving import used_version
from inference.serving.adaptation import Learner
from inference.serving.engine_thread import EngineThread, LoadedModel
from inference.serving.server import Server
from inference.serving.settings import ServeSettings
from inference.serving.used_version import UsedVersion
from inference.trees.shape import TreeShape
from jakiro.errors import ConfigError

IDENTITY = 32 * "a"


@pytest.fixture
def model() -> Iterator[LoadedModel]:
    """A model with a trained drafter."""
    with EngineThread(tiny_decoder(trained=True), places=1, capacity=120) as engine:
        yield LoadedModel(engine)


@pytest.fixture
def drafter(model: LoadedModel) -> TrainedDrafter:
    return used_version.drafter_that_learns(model)


@pytest.fixture
def folder(tmp_path: Path, drafter: TrainedDrafter) -> VersionFolder:
    """A folder with version 2, and version 3, whose weights do not fit."""
    folder = VersionFolder(tmp_path / IDENTITY, IDENTITY)
    weights = dict(drafter.model.named_parameters())
    fitting = {name: weights[name].detach() + 1 for name in adapted_names(drafter.model)}
    for number, content in ((2, fitting), (3, {"other": torch.ones(2)})):
        record = VersionRecord(
            number=number, parent=0, identity=IDENTITY, tenants=(), before=2, after=3, low=1.1
        )
        folder.write(record, content)
    return folder


@pytest.fixture
def before(drafter: TrainedDrafter) -> torch.Tensor:
    """A weight of the drafter itself."""
    return _down(drafter)


@pytest.fixture
def used(
    model: LoadedModel, drafter: TrainedDrafter, folder: VersionFolder, before: torch.Tensor
) -> UsedVersion:
    return UsedVersion(model, drafter, folder)


def _down(drafter: TrainedDrafter) -> torch.Tensor:
    return drafter.model.get_parameter("experts.down").detach().clone()


def test_the_newest_version_that_fits_is_used(
    model: LoadedModel,
    drafter: TrainedDrafter,
    before: torch.Tensor,
    used: UsedVersion,
) -> None:
    assert used.number == 2
    assert torch.equal(_down(drafter), before + 1)
    first, _, version = model.fingerprint.rpartition("_")
    assert asyncio.run(used.replace(0, used.read(0)))
    assert (used.number, model.fingerprint) == (0, first)
    assert version
    assert torch.equal(_down(drafter), before)


def test_drafters_that_cannot_learn_are_refused() -> None:
    settings: dict[str, Any] = {"adapt": "shared", "learner": Learner(("true",), "lookup")}
    decoder = tiny_decoder()
    server = _server(decoder, **settings)
    expected = "only a trained drafter with attention or experts learns"
    with pytest.raises(ConfigError, match=f"{expected}.*LookupDrafter"):
        server()
    target = decoder.target
    model = tiny_drafter(target, VARIANTS["hidden-transfer"])
    drafter = TrainedDrafter(model, target, TreeShape(autoregressive_levels=1))
    other = SpeculativeDecoder(target.model, drafter, decoder.tokenizer, tree="fixed")
    with pytest.raises(ConfigError, match=expected):
        _server(other, **settings)()


def _server(decoder: SpeculativeDecoder, learner: Learner, **settings: Any) -> Callable[[], int]:
    """Return a function that runs a server until it ends."""
    server = Server(lambda: decoder, ServeSettings(port=0, capacity=64, **settings), learner)
    return lambda: asyncio.run(server.run_until_drained(lambda _: server.drain()))
