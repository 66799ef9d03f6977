"""Raw connections to a server, for requests that a well-behaved client does not send."""

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any, NamedTuple

SECONDS = 30.0  # after which a test gives up


class Answer(NamedTuple):
    """An answer of the server; the status is 0 if the connection was closed without one."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The error in the body."""
        found: dict[str, Any] = json.loads(self.body)["error"]
        return found


def head_of(path: str, method: str = "GET", **headers: str) -> bytes:
    """Return the head of a request to this machine."""
    fields: Mapping[str, str] = {"host": "localhost", **headers}
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode("latin-1")


def post_of(path: str, body: bytes, **headers: str) -> bytes:
    """Return a POST request with a body."""
    return head_of(path, "POST", content_length=str(len(body)), **headers) + body


@contextmanager
def connected(address: tuple[str, int], receive_buffer: int = 0) -> Iterator[socket.socket]:
    """Open a connection in the block."""
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(SECONDS)
    connection.connect(address)
    try:
        yield connection
    finally:
        connection.close()


def answer_of(connection: socket.socket) -> Answer:
    """Read until the server closes the connection, and return its first answer."""
    content = b""
    try:
        while data := connection.recv(65_536):
            content += data
    except ConnectionResetError:
        pass
    return parsed(content)


def parsed(content: bytes) -> Answer:
    """Return the answer at the beginning of received bytes."""
    head, _, body = content.partition(b"\r\n\r\n")
    if not head:
        return Answer(0, {}, b"")
    first, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    return Answer(int(first.split()[1]), headers, body)


def asked(address: tuple[str, int], content: bytes) -> Answer:
    """Send bytes, and return the answer.

    Args:
        content: a request with the header `connection: close`, or anything else after which the
            server closes the connection.
    """
    with connected(address) as connection:
        connection.sendall(content)
        return answer_of(connection)


def wait_until(condition: Any) -> None:
    """Wait until a function returns true."""
    end = monotonic() + SECONDS
    while not condition():
        assert monotonic() < end
        sleep(0.005)
