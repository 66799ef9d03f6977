"""The socket of the server, which is opened before anything slow is imported or loaded."""

import socket

from inference.serving.settings import ServeSettings
from jakiro.errors import ResourceError


def listen(settings: ServeSettings) -> socket.socket:
    """Return a socket that listens on the address of the settings.

    Args:
        settings: settings of the server.

    Raises:
        ResourceError: another program uses the port, or this machine does not have the address.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    address = (settings.host, settings.port)
    try:
        return socket.create_server(address, family=family, backlog=2048)
    except OSError as error:
        raise ResourceError(
            f"cannot listen on {settings.host}, port {settings.port}",
            expected="an address of this machine, and a port that is free",
            got=error.strerror or error,
            remedy="choose others with --host and --port",
        ) from error
