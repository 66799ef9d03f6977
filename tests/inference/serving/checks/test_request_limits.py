"""Sizes of requests, and times of their bodies, over a socket."""

from collections.abc import Iterator

import httpx2
from helpers.raw_http import answer_of, asked, connected, head_of
from helpers.serving import Running, running, tiny_decoder


def test_a_large_body_is_refused(server: Running) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(1000):
            yield b" " * 2**20

    response = httpx2.post(f"{server.url}/completions", content=b"{}" * 600_000)
    assert response.status_code == 413
    assert "at most 1048576 bytes" in response.json()["error"]["message"]
    try:
        status = httpx2.post(f"{server.url}/completions", content=endless()).status_code
    except (httpx2.WriteError, httpx2.RemoteProtocolError, httpx2.ReadError):
        status = 413  # the server has closed the connection while the client was writing
    assert status == 413
    assert httpx2.get(f"{server.root}/health").status_code == 200


def test_large_headers_are_refused(server: Running) -> None:
    for content in (
        head_of("/health", cookie="c" * 16_500, connection="close"),
        head_of("/health?" + "q" * 16_500, connection="close"),
        head_of("/health", connection="close", **{f"x_{n}": "v" for n in range(3000)}),
    ):
        answer = asked(server.address, content)
        assert answer.status in {400, 431}
        assert "expected: " in answer.error["message"]
    small = head_of("/health", cookie="c" * 15_000, connection="close")
    assert asked(server.address, small).status == 200


def test_a_body_that_stops_is_refused_and_the_connection_closed() -> None:
    with running(tiny_decoder(), receive_seconds=0.3) as server:
        for head, part in (
            (head_of("/v1/completions", "POST", content_length="100"), b"{"),
            (head_of("/v1/completions", "POST", transfer_encoding="chunked"), b"3\r\n{  \r\n"),
        ):
            with connected(server.address) as connection:
                connection.sendall(head + part)
                answer = answer_of(connection)
            assert answer.status == 408
            assert answer.headers["connection"] == "close"
            assert "the body is incomplete" in answer.error["message"]
