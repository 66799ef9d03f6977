"""A server that could not learn says so before it is ready."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from helpers.serving import tiny_decoder

from inference import SpeculativeDecoder
from inference.serving.learning import preconditions
from inference.serving.learning.adaptation import Learner
from inference.serving.server import Server
from inference.serving.settings import ServeSettings
from jakiro.errors import ConfigError, ResourceError


def test_drafters_that_cannot_learn_are_refused() -> None:
    settings: dict[str, Any] = {"adapt": "shared", "learner": Learner(("true",), "lookup")}
    decoder = tiny_decoder()
    server = _server(decoder, **settings)
    with pytest.raises(ConfigError, match=r"expected: a trained drafter; got: LookupDrafter"):
        server()


def test_too_little_memory_is_found_before_the_server_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = type("Memory", (), {"available": 1000})
    monkeypatch.setattr(preconditions.psutil, "virtual_memory", lambda: memory)
    server = _server(
        tiny_decoder(trained=True), adapt="shared", learner=Learner(("true",), "drafter")
    )
    with pytest.raises(ResourceError, match="no memory for a second copy"):
        server()


def _server(decoder: SpeculativeDecoder, learner: Learner, **settings: Any) -> Callable[[], int]:
    """Return a function that runs a server until it ends."""
    server = Server(lambda: decoder, ServeSettings(port=0, capacity=64, **settings), learner)
    return lambda: asyncio.run(server.run_until_drained(lambda _: server.drain()))
