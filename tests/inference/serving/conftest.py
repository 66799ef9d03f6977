"""A server that the tests of a module share."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.serving import Running, running, tiny_decoder
from openai import OpenAI

from inference.engine.lane import Lane


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server of a target with a trained drafter and trees of a fixed size."""
    with running(tiny_decoder(trained=True), queue=512) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[OpenAI]:
    """A client of the server."""
    with server.client() as found:
        yield found


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding steps that take at least 20 ms."""
    original = Lane.step

    def slow(lane: Lane) -> Any:
        time.sleep(0.02)
        return original(lane)

    monkeypatch.setattr(Lane, "step", slow)
