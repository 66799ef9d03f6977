"""The ends of a server: drained, stopped in the middle of requests, or dead."""

import signal
import socket
import subprocess
import sys
import time
from threading import Event
from typing import Any

import httpx2
import pytest
from helpers.raw_http import wait_until
from helpers.serving import MODEL, SECONDS, Running, running, tiny_decoder
from openai import APIError, InternalServerError

from inference.engine.lane import Lane
from inference.serving.server import Server
from inference.serving.settings import ServeSettings
from jakiro.errors import ConfigError, ResourceError
from jakiro.utils.settings import validate_settings

LONG: dict[str, Any] = {"model": MODEL, "prompt": "def", "max_tokens": 30, "temperature": 0}


@pytest.mark.usefixtures("slow_steps")
def test_running_requests_are_completed_and_new_ones_refused() -> None:
    found = Running(tiny_decoder(), drain_seconds=SECONDS)
    with found.client() as client:
        stream = client.completions.create(stream=True, **LONG)
        chunks = [next(stream)]
        found.server.handle_exit(signal.SIGTERM, None)
        health = httpx2.get(f"{found.root}/health")
        assert health.status_code == 503
        assert health.json() == {"status": "draining", "live": True, "ready": False}
        with pytest.raises(InternalServerError, match="it is draining") as info:
            client.completions.create(**LONG)
        assert info.value.response.headers["retry-after"]
        chunks += stream
    assert chunks[-1].choices[0].finish_reason == "length"
    assert found.join() == 0


@pytest.mark.usefixtures("slow_steps")
def test_requests_that_take_too_long_end_with_an_error() -> None:
    found = Running(tiny_decoder(), drain_seconds=0.1)
    with found.client() as client:
        stream = client.completions.create(stream=True, **{**LONG, "max_tokens": 250})
        next(stream)
        found.server.drain()
        with pytest.raises(APIError, match="the server is shutting down"):
            list(stream)
    assert found.join() == 0


def test_the_second_signal_does_not_wait_for_a_long_step() -> None:
    found = Running(tiny_decoder(), drain_seconds=SECONDS)
    begun, allowed = Event(), Event()

    def step() -> None:
        begun.set()
        allowed.wait(SECONDS)

    found.server.engine.call(step)
    assert begun.wait(SECONDS)
    found.server.handle_exit(signal.SIGTERM, None)
    started = time.monotonic()
    found.server.handle_exit(signal.SIGTERM, None)
    assert found.join() == 0
    assert time.monotonic() - started < 2
    assert found.server.is_computing
    allowed.set()
    wait_until(lambda: not found.server.is_computing)


def test_the_death_of_the_engine_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(_: Lane) -> Any:
        raise RuntimeError("the device is lost")

    found = Running(tiny_decoder())
    monkeypatch.setattr(Lane, "step", planted)
    with found.client() as client, pytest.raises(InternalServerError, match="decoding has failed"):
        client.completions.create(**LONG)
    assert found.join() == 1


def test_a_port_can_be_used_once() -> None:
    decoder = tiny_decoder()
    with running(decoder) as server:
        port = server.server._socket.getsockname()[1]
        with pytest.raises(ResourceError, match=r"cannot listen on 127\.0\.0\.1.*--port"):
            Server(lambda: decoder, ServeSettings(port=port))


def test_other_machines_need_a_key() -> None:
    host = "0.0.0.0"
    with pytest.raises(ConfigError, match="requires a key"):
        validate_settings(ServeSettings, {"host": host}, source="a test")
    keys = {"api_keys": ("secret-key-1",)}
    assert validate_settings(ServeSettings, {"host": host, **keys}, source="a test").host == host


_ENDLESS = """
from threading import Event
from inference.serving.server import serve
from inference.serving.settings import ServeSettings

raise SystemExit(serve(lambda: Event().wait(), ServeSettings(port={port}), print))
"""


def _state_at(url: str) -> str:
    """Return the state of a server; empty if it does not listen yet."""
    try:
        return str(httpx2.get(url).json()["status"])
    except httpx2.ConnectError:
        return ""


@pytest.mark.slow
def test_a_signal_ends_a_process_that_never_stops_loading() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = _ENDLESS.format(port=port)
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        wait_until(lambda: _state_at(f"http://127.0.0.1:{port}/health") == "loading")
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
