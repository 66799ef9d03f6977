"""The ends of a server: drained, stopped in the middle of requests, or dead."""

import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
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


def self_signed(folder: Path) -> dict[str, Path]:
    """Return a new certificate for `localhost`, signed with its own key, as settings."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("the program openssl, which makes the certificate, is not installed")
    paths = {"tls_cert": folder / "cert.pem", "tls_key": folder / "key.pem"}
    words = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-out", str(paths["tls_cert"]), "-keyout", str(paths["tls_key"])]
    subprocess.run([openssl, *words, *names, *files], check=True, capture_output=True)
    return paths


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


@pytest.mark.parametrize(("host", "warns"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_keys_without_tls_are_warned_about(
    host: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ServeSettings(port=0, api_keys=("secret-key-1",), host=host)
    server = Server(tiny_decoder, settings)
    server._socket.close()
    server.service.close()
    assert ("unencrypted" in caplog.text) is warns


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A certificate for `localhost`."""
    return self_signed(tmp_path_factory.mktemp("tls"))


def test_connections_with_tls(certificate: dict[str, Path]) -> None:
    trusting = ssl.create_default_context(cafile=str(certificate["tls_cert"]))
    with running(tiny_decoder(), host="localhost", **certificate) as server:
        url = f"https://localhost:{server.address[1]}/v1"
        with httpx2.Client(verify=trusting) as client:
            body = {**LONG, "max_tokens": 5, "stream": True}
            found = client.post(f"{url}/completions", json=body)
            assert found.status_code == 200
            assert found.text.endswith("data: [DONE]\n\n")
            with pytest.raises(httpx2.ConnectError, match="IP address mismatch"):
                client.get(f"https://127.0.0.1:{server.address[1]}/health")
        with pytest.raises(httpx2.ConnectError, match="self-signed"):
            httpx2.get(f"{url}/models")
        assert server.url.startswith("https://127.0.0.1:")


def test_a_wrong_certificate_is_refused(tmp_path: Path, certificate: dict[str, Path]) -> None:
    other = tmp_path / "none.pem"
    for paths in (
        {**certificate, "tls_key": other},
        {**certificate, "tls_key": certificate["tls_cert"]},
    ):
        with pytest.raises(ConfigError, match="--tls-cert"):
            Server(tiny_decoder, ServeSettings(port=0, **paths))
    with pytest.raises(ConfigError, match="must be given together"):
        validate_settings(ServeSettings, {"tls_cert": other}, source="a test")


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
