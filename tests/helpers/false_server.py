"""A small HTTP server on a real socket whose answers a test makes up."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import MappingProxyType
from typing import Any, NamedTuple

MODELS = {"object": "list", "data": [{"id": "other", "owned_by": "somebody"}]}


class Made(NamedTuple):
    """An answer of the server."""

    status: int = 200
    body: Any = None  # bytes are sent as they are, and everything else as JSON
    headers: Mapping[str, str] = MappingProxyType({})


Answer = Callable[[str, dict[str, Any]], Made]


def completion(text: str, finish_reason: str | None = "stop", **fields: Any) -> dict[str, Any]:
    """Return the body of a completion."""
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}], **fields}


@contextmanager
def false_server(answer: Answer, models: Made | None = None) -> Iterator[str]:
    """Run the server in the block, and yield its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(models or Made(body=MODELS))

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            self._send(answer(self.path, _json(content)))

        def log_message(self, format: str, *_: object) -> None:  # noqa: A002
            """Write nothing."""

        def _send(self, made: Made) -> None:
            body = made.body if isinstance(made.body, bytes) else json.dumps(made.body).encode()
            self.send_response(made.status)
            for name, value in {"content-length": str(len(body)), **made.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _json(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
