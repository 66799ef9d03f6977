"""Whether the hub can be reached."""

import socket
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants

_SECONDS = 3.0  # time in which the hub must accept a connection


def hub_options(name_or_path: str | Path) -> dict[str, bool]:
    """Return arguments of `from_pretrained` that prevent requests to a hub that does not answer.

    Without them, the libraries try again for half a minute before they report an error.
    """
    may_ask = Path(name_or_path).exists() or is_hub_reachable()
    return {} if may_ask else {"local_files_only": True}


@cache  # a loader asks several times, and a missing answer takes seconds
def is_hub_reachable() -> bool:
    """Return whether the hub accepts connections, or whether a proxy is set that may reach it."""
    if constants.HF_HUB_OFFLINE:
        return False
    if getproxies().keys() - {"no"}:
        return True
    hub = urlsplit(constants.ENDPOINT)
    port = hub.port or (80 if hub.scheme == "http" else 443)
    try:
        socket.create_connection((hub.hostname or "", port), timeout=_SECONDS).close()
    except OSError:
        return False
    return True
