"""The socket of the server, which is opened before anything slow is imported or loaded."""

import socket

from inference.serving.settings import ServeSettings
from jakiro.errors import ResourceError


def listen(settings: ServeSettings) -> socket.socket:
    """Return a socket that listens on the address of the settings."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    address = (settings.host, settings.port)
    try:
        listener = socket.create_server(address, family=family, backlog=2048)
    except OSError as error:
        raise ResourceError(
            f"cannot listen on {settings.host}, port {settings.port}",
            expected="an address of this machine, and a port that is free",
            got=error.strerror or error,
            remedy="choose others with --host and --port",
        ) from error
    # Connections inherit this. Otherwise, the body after a head, and each event, may wait 40 ms
    # until the client confirms what was sent before.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
