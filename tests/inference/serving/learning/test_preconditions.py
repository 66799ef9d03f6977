"""A server that could not learn says so before it is ready."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.models import tiny_drafter, tiny_llama
from helpers.serving import tiny_decoder
from helpers.variants import VARIANTS

from inference import SpeculativeDecoder
from inference.drafters.trained.drafter import TrainedDrafter
from inference.serving.learning import used_version
from inference.serving.learning.adaptation import Learner
from inference.serving.server import Server
from inference.serving.settings import ServeSettings
from inference.trees.shape import TreeShape
from jakiro.errors import ConfigError, ResourceError
from jakiro.target.adapter import TargetAdapter


def test_drafters_that_cannot_learn_are_refused() -> None:
    settings: dict[str, Any] = {"adapt": "shared", "learner": Learner(("true",), "lookup")}
    decoder = tiny_decoder()
    server = _server(decoder, **settings)
    expected = "expected: a trained drafter with attention or experts; got: "
    with pytest.raises(ConfigError, match=f"{expected}LookupDrafter"):
        server()
    target = TargetAdapter(tiny_llama())
    drafter = TrainedDrafter(
        tiny_drafter(target, VARIANTS["hidden-transfer"]),
        target,
        TreeShape(autoregressive_levels=1),
    )
    model: Any = SimpleNamespace(engine=SimpleNamespace(decoder=SimpleNamespace(drafter=drafter)))
    with pytest.raises(ConfigError, match=f"{expected}TrainedDrafter without them"):
        used_version.drafter_that_learns(model)


def test_too_little_memory_is_found_before_the_server_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = type("Memory", (), {"available": 1000})
    monkeypatch.setattr(used_version.psutil, "virtual_memory", lambda: memory)
    server = _server(
        tiny_decoder(trained=True), adapt="shared", learner=Learner(("true",), "drafter")
    )
    with pytest.raises(ResourceError, match="no memory for a second copy"):
        server()


def _server(decoder: SpeculativeDecoder, learner: Learner, **settings: Any) -> Callable[[], int]:
    """Return a function that runs a server until it ends."""
    server = Server(lambda: decoder, ServeSettings(port=0, capacity=64, **settings), learner)
    return lambda: asyncio.run(server.run_until_drained(lambda _: server.drain()))
