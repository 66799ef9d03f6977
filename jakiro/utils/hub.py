"""Names of folders and of repositories on the hub, and whether the hub can be reached."""

import socket
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from huggingface_hub import constants
from huggingface_hub.constants import ENDPOINT as HF_ENDPOINT

from jakiro.errors import CheckpointError

_SECONDS = 3.0  # time in which a hub or a proxy must accept a connection


def is_written_as_path(name: str) -> bool:
    """Return whether a name can only be a path, even if nothing exists there, and no id on the hub.

    A name is a path if it starts with `/`, `.` or `~`, if it has more than one slash, or if a
    folder with the name of its first part exists.
    """
    first, *others = name.split("/")
    is_path = not first or first.startswith((".", "~")) or len(others) > 1
    return is_path or (bool(others) and Path(first).is_dir())


def refuse_missing_folder(name_or_path: str | Path, what: str, remedy: str) -> None:
    """Raise an error if a name is the path of a missing folder, instead of asking the hub for it.

    Raises:
        CheckpointError: the name is a path, and nothing exists there.
    """
    name = str(name_or_path)
    if is_written_as_path(name) and not Path(name).exists():
        unexpanded = "; the shell did not expand ~" if name.startswith("~") else ""
        raise CheckpointError(
            f"cannot load {what} {name}",
            expected="an existing folder, or a hub id such as owner/name",
            got=f"a path at which nothing exists{unexpanded}",
            remedy=remedy,
        )


def hub_options(name_or_path: str | Path) -> dict[str, bool]:
    """Return arguments of `from_pretrained` that prevent requests to a hub that does not answer.

    Without them, the libraries try again for half a minute before they report an error.
    """
    may_ask = Path(name_or_path).exists() or is_hub_reachable()
    return {} if may_ask else {"local_files_only": True}


def why_out_of_reach() -> str | None:
    """Return in words why a model that is not on this machine cannot come from the hub either.

    Returns:
        None if the hub may be within reach.
    """
    if not is_hub_reachable():
        reason = f"no connection to {HF_ENDPOINT}"
    elif constants.HF_HUB_OFFLINE:
        reason = "HF_HUB_OFFLINE is set"
    else:
        return None
    return f"no such folder, no such model in the cache, and {reason}"


def is_hub_reachable() -> bool:
    """Return whether the hub, or the proxy between this machine and the hub, accepts connections.

    The libraries would try again for up to a minute before they report that there is no connection.
    """
    hub = urlsplit(HF_ENDPOINT)
    proxies = getproxies()
    proxy = proxies.get(hub.scheme) or proxies.get("all")
    if proxy is None or proxy_bypass(hub.netloc):
        return _answers(HF_ENDPOINT)
    return _answers(proxy if "://" in proxy else f"http://{proxy}")


@cache  # a loader asks several times, and a missing answer takes seconds
def _answers(url: str) -> bool:
    try:
        address = urlsplit(url)
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname or "", port), timeout=_SECONDS).close()
    except (OSError, ValueError):  # a ValueError for a port that is no number
        return False
    return True
