"""Checks of the host, the origin and the key of a request, before it is answered."""

from collections.abc import Set
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from inference.serving.api_error import ApiError
from inference.serving.checks.keys import ApiKeys, User
from inference.serving.checks.rate_limits import FailureLimit

ANY = "*"
_SHOWN = 80  # largest number of characters of a header that an error shows


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to an address.

    Args:
        host: name or address.
    """
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def header_of(scope: Scope, name: bytes) -> str:
    """Return the last value of a header, or an empty text if there is none.

    Args:
        scope: request.
        name: name of the header in lower case.
    """
    value: bytes = dict(scope["headers"]).get(name, b"")
    return value.decode("latin-1")


async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request with an error.

    Args:
        error: the error.
        scope: request.
        receive: function that returns the client's messages.
        send: function that sends a message to the client.
    """
    await JSONResponse(error.body, error.status, error.headers)(scope, receive, send)


class HostCheck:
    """Refuses requests to names that are not this server's.

    A web page can let its own name point to this machine, and would then be of the same origin as
    the server (DNS rebinding). The name is still in the header `Host`.

    Args:
        app: application behind the check.
        host: address on which the server listens.
        allowed: names of the server, besides those of this machine. If there are none, a server
            that other machines can connect to accepts every name.
    """

    def __init__(self, app: ASGIApp, host: str, allowed: tuple[str, ...]) -> None:
        self._app = app
        self._accepts_all = ANY in allowed or not (allowed or is_loopback(host))
        self._names = {name.lower() for name in (*allowed, host)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it.

        Args:
            scope: request.
            receive: function that returns the client's messages.
            send: function that sends a message to the client.
        """
        host = header_of(scope, b"host")
        name = _name_of(host)
        if not host or self._accepts(name):  # every browser sends the header
            await self._app(scope, receive, send)
            return
        error = ApiError(
            421,
            "the server does not have this name; expected: a name of the server; "
            f"got: {name[:_SHOWN]!r} in the header Host; remedy: start it with --allowed-host",
            code="wrong_host",
        )
        await refuse(error, scope, receive, send)

    def _accepts(self, name: str) -> bool:
        return self._accepts_all or name in self._names or is_loopback(name)


class KeyCheck:
    """Refuses requests without a key, except those that are open, and names the user of others.

    The user is in the state of the request. After too many wrong keys, requests of an address are
    refused whatever their key is, so that no answer tells which guess is right.

    Args:
        app: application behind the check.
        keys: accepted keys.
        failures: limit of requests with wrong keys.
        open_paths: paths that need no key.
    """

    def __init__(
        self, app: ASGIApp, keys: ApiKeys, failures: FailureLimit, open_paths: Set[str]
    ) -> None:
        self._app = app
        self._keys = keys
        self._failures = failures
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it.

        Args:
            scope: request.
            receive: function that returns the client's messages.
            send: function that sends a message to the client.
        """
        try:
            if scope["path"] not in self._open_paths:
                scope["state"]["user"] = self._user_of(scope)
        except ApiError as error:
            await refuse(error, scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _user_of(self, scope: Scope) -> User:
        """Return the user of a request.

        Raises:
            ApiError: the request has no accepted key, or too many had none.
        """
        address = scope["client"][0] if scope.get("client") else ""
        self._failures.check(address)
        user = self._keys.user_of(header_of(scope, b"authorization"))
        if user is not None:
            return user
        self._failures.count(address)
        error = ApiError(
            401,
            "the API key is missing or wrong; expected: a header `Authorization: Bearer KEY`; "
            "got: no accepted key; remedy: pass api_key= to the client",
            kind="authentication_error",
            code="invalid_api_key",
        )
        error.headers["www-authenticate"] = "Bearer"
        raise error


class OriginCheck:
    """Refuses requests of web pages of other servers.

    Args:
        app: application behind the check.
        allowed: origins of the other web pages that may send requests.
    """

    def __init__(self, app: ASGIApp, allowed: tuple[str, ...]) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it.

        Args:
            scope: request.
            receive: function that returns the client's messages.
            send: function that sends a message to the client.
        """
        origin = header_of(scope, b"origin")
        if not origin or self._accepts(origin, header_of(scope, b"host")):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            403,
            "this web page may not send requests; expected: an allowed origin; "
            f"got: {origin[:_SHOWN]!r}; remedy: start the server with --allowed-origin",
            kind="permission_error",
            code="wrong_origin",
        )
        await refuse(error, scope, receive, send)

    def _accepts(self, origin: str, host: str) -> bool:
        is_allowed = ANY in self._allowed or origin in self._allowed
        return is_allowed or _address_of(origin) == host.lower()


def _name_of(host: str) -> str:
    """Return a host in lower case without its port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().rstrip(".")


def _address_of(origin: str) -> str | None:
    """Return the host and port of an origin; None if it has none."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None
