"""Raw sockets of clients that are slow or silent, and of too many clients."""

import json
import socket
from contextlib import ExitStack
from time import monotonic
from typing import Any

import httpx2
import pytest
from helpers.raw_http import answer_of, asked, connected, head_of, parsed, post_of, wait_until
from helpers.serving import MODEL, Running, running, tiny_decoder

BODY: dict[str, Any] = {"model": MODEL, "prompt": "def", "max_tokens": 4, "temperature": 0}
SMALL = 2048  # bytes of a buffer of received data


def _is_alive(server: Running) -> bool:
    started = monotonic()
    is_ready = httpx2.get(f"{server.root}/health").status_code == 200
    return is_ready and monotonic() - started < 5


def test_slow_heads_and_bodies_are_refused_while_others_are_answered() -> None:
    with running(tiny_decoder(), receive_seconds=0.5) as server, ExitStack() as stack:
        heads = [stack.enter_context(connected(server.address)) for _ in range(100)]
        bodies = [stack.enter_context(connected(server.address)) for _ in range(100)]
        started = monotonic()
        for connection in heads:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: local")
        for connection in bodies:
            connection.sendall(post_of("/v1/completions", b"{" + b" " * 99)[:-50])
        assert _is_alive(server)
        for connections, part in ((heads, "head"), (bodies, "body")):
            for connection in connections:
                answer = answer_of(connection)
                assert answer.status == 408
                assert answer.error["code"] == "request_timeout"
                assert f"{part}" in answer.error["message"]
                assert "within 0.5 seconds" in answer.error["message"]
        assert monotonic() - started < 20
        assert _is_alive(server)
        wait_until(lambda: len(server.server.server_state.connections) <= 1)


def test_a_head_that_arrives_byte_by_byte_is_refused() -> None:
    with running(tiny_decoder(), receive_seconds=0.3) as server:
        with connected(server.address) as connection:
            started = monotonic()
            connection.settimeout(0.02)
            received = b""
            while monotonic() - started < 10 and not received:
                try:
                    connection.sendall(b"G")
                    received = connection.recv(1000)
                except TimeoutError:
                    continue
            assert parsed(received).status == 408
        assert monotonic() - started < 10


def test_the_head_of_a_second_request_must_arrive_in_time() -> None:
    with running(tiny_decoder(), receive_seconds=0.3) as server:
        with connected(server.address) as connection:
            connection.sendall(head_of("/health"))
            assert parsed(connection.recv(10_000)).status == 200
            connection.sendall(head_of("/health")[:-4])
            assert answer_of(connection).status == 408
        page = httpx2.get(f"{server.root}/metrics").text
    assert 'jakiro_closed_connections_total{why="slow_head"} 1.0' in page


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [("/v1/completions", "POST", 401), ("/health", "POST", 405), ("/health/none", "POST", 401)],
)
def test_a_body_after_an_early_answer_must_arrive_in_time(
    path: str, method: str, status: int
) -> None:
    with running(tiny_decoder(), receive_seconds=0.3, api_keys=("secret-key-1",)) as server:
        with connected(server.address) as connection:
            connection.sendall(head_of(path, method, content_length="100000"))
            assert parsed(connection.recv(10_000)).status == status
            connection.settimeout(0.02)
            end, is_open = monotonic() + 15, True
            while is_open and monotonic() < end:
                try:
                    connection.sendall(b" ")
                    is_open = bool(connection.recv(1000))
                except TimeoutError:
                    continue
                except ConnectionError:
                    is_open = False
        assert not is_open
        page = httpx2.get(
            f"{server.root}/metrics", headers={"authorization": "Bearer secret-key-1"}
        ).text
    assert 'jakiro_closed_connections_total{why="slow_body"} 1.0' in page


def test_a_connection_goes_on_after_the_body_of_an_early_answer() -> None:
    keys = ("secret-key-1",)
    with running(tiny_decoder(), api_keys=keys) as server, connected(server.address) as connection:
        content = post_of("/v1/completions", b"{" + b" " * 500)
        connection.sendall(content[:-100])
        received = b""
        while not received.endswith(b"}}"):
            received += connection.recv(10_000)
        assert parsed(received).status == 401
        connection.sendall(content[-100:])
        connection.sendall(head_of("/health", connection="close"))
        assert answer_of(connection).status == 200


def test_a_silent_connection_is_closed() -> None:
    with running(tiny_decoder(), receive_seconds=0.2) as server:
        with connected(server.address) as connection:
            assert answer_of(connection).status == 0
        with connected(server.address) as connection:  # also between two requests
            connection.sendall(head_of("/health"))
            assert answer_of(connection).status == 200


def test_a_connection_can_be_used_again() -> None:
    with running(tiny_decoder(), receive_seconds=1.0) as server, httpx2.Client() as client:
        for _ in range(5):
            found = client.post(f"{server.url}/completions", json=BODY)
            assert found.status_code == 200
        assert len(server.server.server_state.connections) == 1


def test_answers_and_events_are_sent_at_once() -> None:
    with running(tiny_decoder()) as server, connected(server.address):
        wait_until(lambda: len(server.server.server_state.connections) == 1)
        connection: Any = next(iter(server.server.server_state.connections))
        found = connection.transport.get_extra_info("socket")
        assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_too_many_connections_are_refused() -> None:
    with running(tiny_decoder(), max_connections=5) as server:
        with ExitStack() as stack:
            for _ in range(5):
                stack.enter_context(connected(server.address))
            wait_until(lambda: len(server.server.server_state.connections) == 5)
            with connected(server.address) as connection:
                answer = answer_of(connection)
            assert answer.status == 503
            assert answer.error["code"] == "too_many_connections"
            assert answer.headers["retry-after"] == "1"
        wait_until(lambda: not server.server.server_state.connections)
        assert _is_alive(server)


@pytest.mark.usefixtures("slow_steps")
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_takes_no_data_is_disconnected(stream: bool) -> None:
    """The response is larger than the buffers of both ends."""
    body = {**BODY, "max_tokens": 60, "n": 8, "logprobs": 5, "stream": stream, "prompt": "\n" * 3}
    with running(tiny_decoder(), stall_seconds=0.3) as server:
        server.server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
        scheduler = server.server.engine.scheduler
        with connected(server.address, SMALL) as stalled:
            stalled.sendall(post_of("/v1/completions", json.dumps(body).encode()))
            wait_until(lambda: scheduler.num_running == 8)
            wait_until(lambda: scheduler.num_running == 0)
            wait_until(lambda: not server.server.server_state.connections)
            wait_until(lambda: server.server.service.num_active == 0)
        page = httpx2.get(f"{server.root}/metrics").text
        assert ('jakiro_cancelled_total{why="disconnected"} 1.0' in page) is stream
        assert 'jakiro_closed_connections_total{why="stalled"} 1.0' in page
        assert httpx2.post(f"{server.url}/completions", json=BODY).status_code == 200


@pytest.mark.parametrize(
    "content",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the beginning of TLS
        b"\x00" * 100,
        b"GET / HTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",  # without a host
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: example.org\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nbad header\r\n\r\n",
        head_of("/v1/completions", "POST", content_length="-1"),
        head_of("/v1/completions", "POST", content_length="9" * 30 + "x"),
        head_of("/v1/completions", "POST", transfer_encoding="chunked") + b"zz\r\n",
        b"GET /" + b"x" * 100_000,
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"x: y\r\n" * 10_000,
    ],
    ids=str,
)
def test_bytes_that_are_not_a_request_are_refused(server: Running, content: bytes) -> None:
    with connected(server.address) as connection:
        connection.sendall(content)
        if not content.endswith(b"\r\n"):
            connection.shutdown(socket.SHUT_WR)
        answer = answer_of(connection)
    assert answer.status in {0, 400, 431}
    if answer.status:
        assert "expected: " in answer.error["message"]
    assert _is_alive(server)


def test_garbage_after_a_request_does_not_hurt_its_answer(server: Running) -> None:
    content = post_of("/v1/completions", json.dumps(BODY).encode()) + b"\x00garbage\r\n\r\n"
    answer = asked(server.address, content)
    assert answer.status == 200
    assert _is_alive(server)


def test_a_client_that_stops_sending_looks_like_one_that_is_gone(
    server: Running, slow_steps: None
) -> None:
    with connected(server.address) as connection:
        connection.sendall(
            post_of("/v1/completions", json.dumps(BODY | {"max_tokens": 99}).encode())
        )
        wait_until(lambda: server.server.engine.scheduler.num_running > 0)
        connection.shutdown(socket.SHUT_WR)
        assert answer_of(connection).status == 0
    server.wait_until_idle()
    assert _is_alive(server)
