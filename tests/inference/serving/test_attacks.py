"""Hostile clients on raw sockets: nothing that they send hurts the server or others."""

import gc
import json
import logging
import random
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx2
import pytest
from helpers.raw_http import Answer, asked, connected, head_of, post_of, wait_until
from helpers.serving import MODEL, Running, running, tiny_decoder

BODY: dict[str, Any] = {"model": MODEL, "prompt": "def", "max_tokens": 4, "temperature": 0}
RESET = struct.pack("ii", 1, 0)  # closing a connection with this option resets it


@pytest.fixture(scope="module")
def target() -> Iterator[Running]:
    with running(tiny_decoder(), queue=512) as found:
        gc.freeze()  # as the process of a server does
        yield found
        gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_errors_in_the_log(caplog: pytest.LogCaptureFixture, target: Running) -> Iterator[None]:
    """Check after each test that the server works, that nothing is left, and the log."""
    yield
    assert httpx2.post(f"{target.url}/completions", json=BODY).status_code == 200
    target.wait_until_idle()
    wait_until(lambda: target.server.service.num_active == 0)
    for phase in ("setup", "call"):
        records = caplog.get_records(phase)
        assert [own.getMessage() for own in records if own.levelno >= logging.ERROR] == []


def _posted(target: Running, body: bytes, path: str = "/v1/completions") -> Answer:
    return asked(target.address, post_of(path, body, connection="close"))


@pytest.mark.parametrize(
    "fields",
    [
        '"prompt":[' + ",".join(["1.5"] * 250_000) + "]",
        '"prompt":' + "[" * 500_000,
        '"prompt":"a",' + ",".join(f'"k{n}":1' for n in range(80_000)),
        '"prompt":"a","max_tokens":' + "9" * 5000,
        '"prompt":"a","temperature":1e999999',
        '"prompt":"a","logit_bias":{"1":Infinity}',
        '"prompt":"\\ud800"',
        '"prompt":""',
        '"prompt":no JSON',
    ],
    ids=lambda text: f"{text[:30]} ({len(text)})",
)
def test_hostile_bodies_are_refused(target: Running, fields: str) -> None:
    answer = _posted(target, f'{{"model":"{MODEL}",{fields}}}'.encode())
    assert answer.status == 400
    assert len(answer.body) < 1000


def test_streams_that_are_cut_free_their_places(target: Running) -> None:
    rng = random.Random(6)
    works = [(rng.randrange(4000), rng.random() < 0.5, rng.random() < 0.5) for _ in range(20)]

    def cut(work: tuple[int, bool, bool]) -> None:
        size, is_reset, stream = work
        body = json.dumps({**BODY, "max_tokens": 200, "stream": stream, "temperature": 1}).encode()
        with connected(target.address) as connection:
            connection.sendall(post_of("/v1/completions", body))
            received = 0
            connection.settimeout(0.5)
            with suppress(TimeoutError):
                while received < size and (data := connection.recv(100)):
                    received += len(data)
            if is_reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)

    with ThreadPoolExecutor(20) as pool:
        alone = pool.submit(httpx2.post, f"{target.url}/completions", json=BODY, timeout=30)
        list(pool.map(cut, works))
    assert alone.result().status_code == 200


def test_nothing_that_clients_send_is_logged(
    target: Running, caplog: pytest.LogCaptureFixture
) -> None:
    canary = "canary-2c91"
    caplog.set_level(logging.DEBUG, "jakiro")
    _posted(target, json.dumps({**BODY, "prompt": canary, "user": canary}).encode())
    _posted(target, json.dumps({**BODY, "prompt": [canary, 1]}).encode())
    asked(target.address, head_of(f"/{canary}?{canary}", connection="close", x_api_key=canary))
    texts = [record.getMessage() for record in caplog.records if record.name.startswith("jakiro")]
    assert not [text for text in texts if canary in text]
