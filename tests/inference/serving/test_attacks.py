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
from pathlib import Path
from time import monotonic
from typing import Any

import httpx2
import pytest
from helpers.raw_http import Answer, answer_of, asked, connected, head_of, post_of, wait_until
from helpers.serving import MODEL, Running, running, tiny_decoder

BODY: dict[str, Any] = {"model": MODEL, "prompt": "def", "max_tokens": 4, "temperature": 0}
MEGABYTE = 2**20
RESET = struct.pack("ii", 1, 0)  # closing a connection with this option resets it


@pytest.fixture(scope="module")
def target() -> Iterator[Running]:
    """A server with short limits of time."""
    with running(tiny_decoder(), queue=512, receive_seconds=1.0, stall_seconds=1.0) as found:
        gc.freeze()  # as the process of a server does
        yield found
        gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_errors_in_the_log(caplog: pytest.LogCaptureFixture, target: Running) -> Iterator[None]:
    """Check after each test that the server works, that nothing is left, and the log."""
    yield
    started = monotonic()
    answer = httpx2.post(f"{target.url}/completions", json=BODY)
    assert answer.status_code == 200
    assert monotonic() - started < 5
    target.wait_until_idle()
    wait_until(lambda: target.server.service.num_active == 0)
    wait_until(lambda: not target.server.server_state.connections)
    for phase in ("setup", "call"):
        records = caplog.get_records(phase)
        assert [own.getMessage() for own in records if own.levelno >= logging.ERROR] == []


def _posted(target: Running, body: bytes, path: str = "/v1/completions") -> Answer:
    return asked(target.address, post_of(path, body, connection="close"))


def _many(part: str, count: int) -> str:
    return ",".join([part] * count)


@pytest.mark.parametrize(
    "fields",
    [
        '"prompt":[' + _many("1", 500_000) + "]",
        '"prompt":[' + _many("1.5", 250_000) + "]",
        '"prompt":[' + _many('"a"', 250_000) + "]",
        '"prompt":[' + _many("[1]", 250_000) + "]",
        '"prompt":[' + _many("null", 200_000) + "]",
        '"prompt":' + "[" * 500_000,
        '"prompt":"a","metadata":' + '{"a":' * 200_000,
        '"prompt":"a","stop":[' + _many('"x"', 100_000) + "]",
        '"prompt":"a","logit_bias":{' + ",".join(f'"{n}":"x"' for n in range(80_000)) + "}",
        '"prompt":"a",' + ",".join(f'"k{n}":1' for n in range(80_000)),
        '"prompt":"a","n":1000000',
        '"prompt":"a","logprobs":1000000000',
        '"prompt":"a","max_tokens":1000000000000',
        '"prompt":"a","max_tokens":' + "9" * 5000,
        '"prompt":"a","temperature":NaN',
        '"prompt":"a","temperature":-Infinity',
        '"prompt":"a","temperature":1e999999',
        '"prompt":"a","seed":1e30',
        '"prompt":"a","frequency_penalty":NaN',
        '"prompt":"a","logit_bias":{"1":Infinity}',
        '"prompt":"\\ud800"',
        '"prompt":""',
        '"prompt":"a","prompt":1',
        '"prompt":"a\x00"}{',
    ],
    ids=lambda text: f"{text[:30]} ({len(text)})",
)
def test_hostile_bodies_are_refused_quickly(target: Running, fields: str) -> None:
    content = f'{{"model":"{MODEL}",{fields}}}'.encode()
    started = monotonic()
    answer = _posted(target, content)
    assert monotonic() - started < 1
    assert answer.status == 400
    assert "expected: " in answer.error["message"]
    assert len(answer.body) < 2000


@pytest.mark.parametrize(
    "body",
    [b"\xff\xfe\x00", b'{"model":"\xc3\x28"}', b"\xef\xbb\xbf{}", b"\x00", b"", b"null", b"1"],
)
def test_what_is_no_object_in_utf_8_is_refused(target: Running, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = _posted(target, body, path)
        assert answer.status == 400


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_an_endless_body_takes_no_memory(target: Running) -> None:
    """Chunks of 1 MB are sent until the server closes the connection."""
    chunk = b"100000\r\n" + b" " * MEGABYTE + b"\r\n"
    _posted(target, b"{}")
    before = _resident_bytes()
    num_sent = 0
    with connected(target.address) as connection:
        connection.sendall(head_of("/v1/completions", "POST", transfer_encoding="chunked"))
        with suppress(ConnectionError):
            while num_sent < 1024:
                connection.sendall(chunk)
                num_sent += 1
    assert num_sent < 50
    assert _resident_bytes() - before < 32 * MEGABYTE


def test_garbage_and_cut_requests(target: Running) -> None:
    """Random bytes, and real requests with changed, missing or additional bytes."""
    rng = random.Random(5)
    whole = post_of("/v1/completions", json.dumps({**BODY, "stream": True}).encode())

    def content() -> bytes:
        kind = rng.randrange(4)
        if kind == 0:
            return rng.randbytes(rng.randrange(1, 3000))
        if kind == 1:
            return whole[: rng.randrange(len(whole))]
        changed = bytearray(whole)
        for _ in range(rng.randrange(1, 6)):
            start = rng.randrange(len(changed))
            changed[start : start + kind - 2] = rng.randbytes(rng.randrange(1, 3))
        return bytes(changed)

    def attack(data: bytes) -> int:
        with connected(target.address) as connection:
            try:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                return answer_of(connection).status
            except OSError:
                return 0

    with ThreadPoolExecutor(16) as pool:
        statuses = list(pool.map(attack, [content() for _ in range(300)]))
    assert set(statuses) <= {0, 200, 400, 401, 403, 404, 405, 408, 413, 421, 431}
    assert len(set(statuses)) > 3


def test_streams_that_are_cut_free_their_places(target: Running) -> None:
    rng = random.Random(6)
    works = [(rng.randrange(4000), rng.random() < 0.5, rng.random() < 0.5) for _ in range(60)]

    def cut(work: tuple[int, bool, bool]) -> None:
        size, is_reset, stream = work
        body = json.dumps({**BODY, "max_tokens": 200, "stream": stream, "temperature": 1}).encode()
        with connected(target.address) as connection:
            connection.sendall(post_of("/v1/completions", body))
            received = 0
            connection.settimeout(0.5)
            try:
                while received < size and (data := connection.recv(100)):
                    received += len(data)
            except TimeoutError:
                pass
            if is_reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)

    with ThreadPoolExecutor(20) as pool:
        alone = pool.submit(httpx2.post, f"{target.url}/completions", json=BODY, timeout=30)
        list(pool.map(cut, works))
    assert alone.result().status_code == 200


def test_a_flood_of_connections_without_requests(target: Running) -> None:
    connections = [socket.create_connection(target.address) for _ in range(300)]
    try:
        started = monotonic()
        assert httpx2.get(f"{target.root}/health").status_code == 200
        assert monotonic() - started < 1
    finally:
        for connection in connections:
            connection.close()


def test_headers_that_are_repeated_or_strange(target: Running) -> None:
    body = json.dumps(BODY).encode()
    length = f"content-length: {len(body)}"
    start = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    for lines, statuses in (
        ([length, length], {200, 400}),
        ([length, "content-length: 1"], {400}),
        ([length, "transfer-encoding: chunked"], {400, 408}),
        ([length, "content-type: text/plain"], {200}),
        ([length, "content-encoding: gzip"], {200}),
        ([length, "authorization: a", "authorization: b"], {200}),
        ([length, "expect: 100-continue"], {100, 200}),
        ([length, "upgrade: websocket", "connection: upgrade"], {200}),
        ([length, "x-request-id: " + "a" * 1000], {200}),
        ([length, "x-forwarded-for: 1.2.3.4, <script>"], {200}),
        ([length, "origin: http://[", "x: y"], {403}),
        ([length, *(f"x-{n}: {n}" for n in range(5000))], {400, 431}),
        ([length, "cookie: " + "c" * 30_000], {400, 431}),
    ):
        content = (start + "\r\n".join(lines) + "\r\n\r\n").encode() + body
        assert asked(target.address, content).status in statuses, lines[1][:40]


def test_nothing_that_clients_send_is_logged(
    target: Running, caplog: pytest.LogCaptureFixture
) -> None:
    canary = "canary-2c91"
    caplog.set_level(logging.DEBUG, "jakiro")
    chat = {"model": MODEL, "messages": [{"role": "user", "content": canary}], "max_tokens": 3}
    _posted(target, json.dumps({**BODY, "prompt": canary, "user": canary}).encode())
    _posted(target, json.dumps(chat).encode(), "/v1/chat/completions")
    _posted(target, json.dumps({**BODY, "prompt": [canary, 1]}).encode())
    asked(target.address, head_of(f"/{canary}?{canary}", connection="close", x_api_key=canary))
    asked(
        target.address, head_of("/v1/models", authorization=f"Bearer {canary}", connection="close")
    )
    texts = [record.getMessage() for record in caplog.records if record.name.startswith("jakiro")]
    assert texts
    assert not [text for text in texts if canary in text]
