"""The states of a server: loading, ready, draining, dead."""

import asyncio
from threading import Event, Thread
from typing import Any

import httpx2
import pytest
from helpers.raw_http import wait_until
from helpers.serving import MODEL, SECONDS, tiny_decoder

from inference import SpeculativeDecoder
from inference.serving.server import Server
from inference.serving.settings import ServeSettings
from jakiro.errors import TargetNotSupported


class Starting:
    """A server whose decoder is loaded as soon as the test allows it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.may_load = Event()
        self.urls: list[str] = []
        self.outcome: list[Any] = []
        self._error = error
        settings = ServeSettings(port=0, capacity=64, model_name=MODEL)
        self.server = Server(self._load, settings)
        self.root = self.server.url.removesuffix("/v1")
        self.thread = Thread(target=self._run)
        self.thread.start()
        wait_until(lambda: self.server.started)

    def _load(self) -> SpeculativeDecoder:
        assert self.may_load.wait(SECONDS)
        if self._error is not None:
            raise self._error
        return tiny_decoder()

    def _run(self) -> None:
        try:
            self.outcome.append(asyncio.run(self.server.run_until_drained(self.urls.append)))
        except Exception as error:  # noqa: BLE001 - the test compares it
            self.outcome.append(error)

    def join(self) -> Any:
        """Wait for the end of the server, and return its exit code or its error."""
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()
        return self.outcome[0]

    def health(self, path: str = "/health") -> tuple[int, dict[str, Any]]:
        """Return the status and body of an answer about the state."""
        found = httpx2.get(self.root + path)
        return found.status_code, found.json()


LOADING = {"status": "loading", "live": True, "ready": False}
READY = {"status": "ready", "live": True, "ready": True}


def test_requests_are_refused_until_the_model_is_loaded() -> None:
    starting = Starting()
    body = {"model": MODEL, "prompt": "a", "max_tokens": 2}
    assert starting.health() == (503, LOADING)
    assert starting.health("/health/live") == (200, LOADING)
    for path in ("completions", "chat/completions"):
        found = httpx2.post(f"{starting.root}/v1/{path}", json=body)
        assert found.status_code == 503
        assert int(found.headers["retry-after"]) >= 1
        assert found.json()["error"]["code"] == "loading"
    assert httpx2.get(f"{starting.root}/v1/models").status_code == 503
    assert httpx2.get(f"{starting.root}/metrics").status_code == 200
    assert starting.urls == []
    starting.may_load.set()
    wait_until(lambda: starting.urls == [starting.server.url])
    assert starting.health() == (200, READY)
    assert starting.health("/health/live") == (200, READY)
    assert httpx2.post(f"{starting.root}/v1/completions", json=body).status_code == 200
    starting.server.drain()
    assert starting.join() == 0


def test_a_signal_during_loading_ends_the_server_at_once() -> None:
    starting = Starting()
    starting.server.drain()
    assert starting.join() == 0
    assert starting.server.is_loading
    assert starting.urls == []
    starting.may_load.set()
    wait_until(lambda: not starting.server.is_loading)


def test_an_error_of_loading_ends_the_server() -> None:
    error = TargetNotSupported("this target has another attention")
    starting = Starting(error)
    starting.may_load.set()
    assert starting.join() is error
    assert not starting.server.is_loading
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(starting.root + "/health")
