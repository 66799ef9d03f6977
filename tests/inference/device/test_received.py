"""A server cannot make a device read more than an answer can contain."""

import gzip
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import httpx2
import pytest

from inference.device.link import LinkTraffic, ServerLink
from inference.device.received import answer_to
from inference.remote.client_session import Fetch, Send
from inference.remote.messages import OpenSession
from jakiro.errors import ConfigError, JakiroError, ResourceError

PART = b" " * 65_536
MOST = 64 * 2**20  # bytes that the server sends if nobody stops it
ROW = 128  # bytes

Calls = dict[str, Callable[[ServerLink], object]]
CALLS: Calls = {
    "info": lambda link: link.info(),
    "open": lambda link: link.open(
        OpenSession(prompt="a", seed=0, max_tokens=2**30), LinkTraffic()
    ),
    "submit": lambda link: link.submit(Send("a", 1, b"", 65), LinkTraffic(), ROW),
    "memory": lambda link: link.memory(Fetch("a", 0, 256), LinkTraffic(), ROW),
}


class Endless:
    """A server on a real socket that answers with spaces without end."""

    def __init__(self, status: int = 200, coding: str | None = None) -> None:
        self.num_sent = 0
        own = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                self.send_response(status)
                if coding is not None:
                    self.send_header("content-encoding", coding)
                self.end_headers()
                try:
                    while own.num_sent < MOST:
                        self.wfile.write(PART)
                        own.num_sent += len(PART)
                except OSError:
                    return

            do_GET = do_POST = do_PUT = do_DELETE = answer  # noqa: N815

            def log_message(self, format: str, *_: object) -> None:  # noqa: A002
                """Write nothing."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True


@contextmanager
def _endless(
    status: int = 200, coding: str | None = None, patience: float = 5.0
) -> Iterator[tuple[ServerLink, Endless]]:
    server = Endless(status, coding)
    thread = Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    link = ServerLink(f"http://127.0.0.1:{server.http.server_port}/v1", patience=patience)
    try:
        yield link, server
    finally:
        link.close()
        server.http.shutdown()
        server.http.server_close()
        thread.join()


@pytest.mark.parametrize("name", CALLS)
def test_an_answer_without_end_is_refused_at_once(name: str) -> None:
    with _endless() as (link, server):
        with pytest.raises(ConfigError, match=r"answers with more .*; expected: at most \d+ bytes"):
            CALLS[name](link)
        assert server.num_sent < MOST / 4  # what sockets hold is sent, but not read


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("coding", ["gzip", "deflate", "br"])
def test_compressed_answers_are_not_read(name: str, coding: str) -> None:
    with _endless(coding=coding) as (link, server):
        with pytest.raises(ConfigError, match=f"got: the encoding {coding}; remedy: check the URL"):
            CALLS[name](link)
        assert server.num_sent < MOST / 4


@pytest.mark.parametrize("name", CALLS)
def test_an_error_without_end_is_described_by_its_status(name: str) -> None:
    with _endless(status=500, patience=0.0) as (link, server):
        with pytest.raises(ResourceError, match="status 500"):
            CALLS[name](link)
        assert server.num_sent < MOST / 4


def test_the_end_of_a_session_ignores_what_the_server_answers() -> None:
    with _endless() as (link, server):
        link.end("a")
        assert server.num_sent < MOST / 4


def _client(body: bytes, **headers: str) -> httpx2.Client:
    """Return a client of a server with a single answer."""
    made = httpx2.MockTransport(
        lambda _: httpx2.Response(200, headers=headers, stream=httpx2.ByteStream(body))
    )
    return httpx2.Client(base_url="http://server/v1", transport=made)


def test_an_answer_within_the_limit_is_complete() -> None:
    with _client(b"12345678") as http:
        found = answer_to(http, "GET", "verify", b"", 8)
        assert (found.status, found.content, found.is_success) == (200, b"12345678", True)
        with pytest.raises(ConfigError, match=r"server at http://server/v1 .*at most 7 bytes"):
            answer_to(http, "GET", "verify", b"", 7)


@pytest.mark.parametrize("size", [10, 10**7])
def test_a_compressed_answer_is_refused_whatever_its_size(size: int) -> None:
    body = gzip.compress(bytes(size))
    with _client(body, **{"content-encoding": "gzip"}) as http, pytest.raises(JakiroError):
        answer_to(http, "GET", "verify", b"", 10**9)
