"""The ends of a server: drained, stopped in the middle of requests, or dead."""

import asyncio
import signal
import time
from typing import Any

import httpx2
import pytest
from helpers.serving import MODEL, SECONDS, Running, running, tiny_decoder
from openai import APIError, InternalServerError

from inference.engine.lane import Lane
from inference.serving.server import Server
from inference.serving.settings import ServeSettings
from jakiro.errors import ConfigError, PromptError, ResourceError
from jakiro.utils.settings import validate_settings

LONG: dict[str, Any] = {"model": MODEL, "prompt": "def", "max_tokens": 60, "temperature": 0}


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
        with pytest.raises(InternalServerError, match="got: draining") as info:
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
        with pytest.raises(APIError, match="the engine has stopped"):
            list(stream)
    assert found.join() == 0


@pytest.mark.usefixtures("slow_steps")
def test_the_second_signal_ends_the_server_at_once() -> None:
    found = Running(tiny_decoder(), drain_seconds=SECONDS)
    with found.client() as client:
        stream = client.completions.create(stream=True, **{**LONG, "max_tokens": 250})
        next(stream)
        found.server.handle_exit(signal.SIGTERM, None)
        started = time.monotonic()
        found.server.handle_exit(signal.SIGTERM, None)
        assert found.join() == 0
        assert time.monotonic() - started < 1
        stream.close()


def test_the_death_of_the_engine_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(_: Lane) -> Any:
        raise RuntimeError("the device is lost")

    found = Running(tiny_decoder())
    monkeypatch.setattr(Lane, "step", planted)
    with found.client() as client, pytest.raises(InternalServerError, match="device is lost"):
        client.completions.create(**LONG)
    assert found.join() == 1


def test_a_port_can_be_used_once() -> None:
    decoder = tiny_decoder()
    with running(decoder) as server:
        port = server.server._socket.getsockname()[1]
        with pytest.raises(ResourceError, match=r"cannot listen on 127\.0\.0\.1.*--port"):
            Server(lambda: decoder, ServeSettings(port=port))


def test_a_decoder_without_a_tokenizer_cannot_be_served() -> None:
    decoder = tiny_decoder()
    decoder.tokenizer = None
    server = Server(lambda: decoder, ServeSettings(port=0))
    with pytest.raises(PromptError, match="has no tokenizer"):
        asyncio.run(server.run_until_drained(print))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_other_machines_need_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="requires a key"):
        validate_settings(ServeSettings, {"host": host}, source="a test")
    keys = {"api_keys": ("secret-key-1",)}
    assert validate_settings(ServeSettings, {"host": host, **keys}, source="a test").host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_this_machine_needs_no_key(host: str) -> None:
    assert ServeSettings(host=host).api_keys == ()
