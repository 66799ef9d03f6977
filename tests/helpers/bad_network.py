"""A proxy on a real socket that loses chosen requests and replies."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from typing import Any

# Faults of one request: it is passed on, lost before or after the server has answered, its reply is
# cut in the middle or replaced, the server seems to be busy, or a gateway before it has an error.
PASSED, LOST, UNANSWERED = "passed", "lost", "unanswered"
CUT, REPLACED, BUSY, GATEWAY = "cut", "replaced", "busy", "gateway"
FAULTS = (LOST, UNANSWERED, CUT, REPLACED, BUSY, GATEWAY)
# The reply is lost, and the connection stays open, as if the client's address had changed.
SILENT = "silent"
_SECONDS = 30.0
_MOST_WAITING = 256  # connections that are not accepted yet

Schedule = Callable[[int, str], str]  # number of the request and its path -> its fault


class BadNetwork:
    """A proxy in front of a server."""

    def __init__(self, server: str, schedule: Schedule = lambda _number, _path: PASSED) -> None:
        self.server = server
        self.schedule = schedule
        self.num_requests = 0
        self.on_reply: Callable[[str, bytes], object] = lambda _path, _body: None
        self.is_closed = Event()
        self._lock = Lock()
        self._http = _Proxy(("127.0.0.1", 0), type("Handler", (_Handler,), {"network": self}))
        self._thread = Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.005})
        self._thread.start()

    @property
    def url(self) -> str:
        """The address of the proxy."""
        return f"http://127.0.0.1:{self._http.server_port}/v1"

    def next_fault(self, path: str) -> str:
        """Count a request, and return its fault."""
        with self._lock:
            number = self.num_requests
            self.num_requests += 1
        return self.schedule(number, path)

    def close(self) -> None:
        """Stop the proxy."""
        self.is_closed.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = _MOST_WAITING

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error, unless the client has only closed its connection."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    wbufsize = 65_536  # so that head and body travel together
    network: BadNetwork

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        fault = self.network.next_fault(self.path)
        if fault == BUSY:
            self._reply(503, b"busy")
            return
        if fault == GATEWAY:
            self._reply(502, b'{"error": {"message": "bad gateway"}}')
            return
        if fault == LOST:
            self.close_connection = True
            return
        try:
            status, content = self._forwarded(body)
        except (OSError, HTTPException):  # the server has ended
            self.close_connection = True
            return
        self.network.on_reply(self.path, content)
        if fault == SILENT:
            self.network.is_closed.wait(_SECONDS)
        if fault in (UNANSWERED, SILENT):
            self.close_connection = True
            return
        content = b"<html>login</html>" if fault == REPLACED else content
        self._reply(status, content, is_cut=fault == CUT)

    do_GET = do_POST = do_PUT = do_DELETE = _pass_on  # noqa: N815

    def _forwarded(self, body: bytes) -> tuple[int, bytes]:
        names = ("authorization", "content-type")
        kept = {name: self.headers[name] for name in names if name in self.headers}
        server = HTTPConnection(self.network.server.removeprefix("http://"), timeout=30)
        try:
            server.request(self.command, self.path, body, kept)
            answer = server.getresponse()
            return answer.status, answer.read()
        finally:
            server.close()

    def _reply(self, status: int, content: bytes, is_cut: bool = False) -> None:
        self.close_connection |= is_cut
        self.send_response(status)
        if status != 204:
            self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if is_cut else content)

    def log_message(self, format: str, *_: object) -> None:  # noqa: A002
        """Write nothing."""


@contextmanager
def bad_network(server: str, schedule: Schedule) -> Iterator[BadNetwork]:
    """Run a proxy in the block."""
    found = BadNetwork(server, schedule)
    try:
        yield found
    finally:
        found.close()
