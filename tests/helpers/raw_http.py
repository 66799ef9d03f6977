"""Raw connections to a server, for requests whose client goes away, and waiting."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any

SECONDS = 30.0  # after which a test gives up


@contextmanager
def posted(address: tuple[str, int], path: str, body: bytes) -> Iterator[socket.socket]:
    """Send a POST request over a connection, which is closed after the block."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(address, SECONDS) as connection:
        connection.sendall(head.encode() + body)
        yield connection


def wait_until(condition: Any) -> None:
    """Wait until a function returns true."""
    end = monotonic() + SECONDS
    while not condition():
        assert monotonic() < end
        sleep(0.005)
