"""Who may send requests, from which web pages, and how large requests may be."""

import hmac
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path

from pydantic import Field, SecretStr
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference.serving.api_error import ApiError
from jakiro.errors import ConfigError
from jakiro.utils.settings import Settings, load_settings

_HASH_DIGITS = 64
_FREE_FOLDERS = ("/health", "/playground/")
MOST_BYTES = 1 << 22  # largest size of a request body
EVERYONE = "everyone"  # the user of all requests to a server without keys


class KeysFile(Settings):
    keys: dict[str, SecretStr] = Field(min_length=1)
    """The SHA-256 of each key, 64 hexadecimal digits, by the name of its user."""


class ApiKeys:
    """The users of a server by their keys, of which only hashes are kept."""

    def __init__(self, keys: Iterable[str] = (), file: Path | None = None) -> None:
        self._hashes = {f"key {n}": _hash(key) for n, key in enumerate(keys, 1)}
        if file is not None:
            for name, hashed in load_settings(KeysFile, file).keys.items():
                self._hashes[name] = hashed.get_secret_value().lower().encode()
                if len(self._hashes[name]) != _HASH_DIGITS:  # it may be the key itself
                    raise ConfigError(f"the hash of {name} in {file} has not {_HASH_DIGITS} digits")

    @property
    def are_several(self) -> bool:
        """Whether there are several users, whose texts are kept apart."""
        return len(self._hashes) > 1

    def user_of(self, authorization: str) -> str | None:
        """Return the user of a request by its header `Authorization`; None if none is accepted.

        The time of the comparison depends neither on the key that is sent nor on which key fits.
        """
        if not self._hashes:
            return EVERYONE
        scheme, _, sent_key = authorization.partition(" ")
        sent = _hash(sent_key.strip())
        users = [user for user, key in self._hashes.items() if hmac.compare_digest(sent, key)]
        return users[0] if users and scheme.lower() == "bearer" else None


def _hash(key: str) -> bytes:
    return sha256(key.encode()).hexdigest().encode()


class AccessCheck:
    """Refuses requests of foreign web pages and those without a key, and names the user.

    The state of the server and the page need no key: a browser that opens a page sends none.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, origins: Sequence[str]) -> None:
        self._app = app
        self._keys, self._origins = keys, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            headers = Headers(scope=scope)
            self._check_origin(headers)
            if not scope["path"].startswith(_FREE_FOLDERS) and scope["path"] != "/":
                scope["state"]["user"] = self._user_of(headers)
        except ApiError as error:
            await error.response(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check_origin(self, headers: Headers) -> None:
        """Refuse a page of another server: browsers send what it asks for, even without CORS."""
        origin = headers.get("origin")
        if origin is None or "*" in self._origins or origin in self._origins:
            return
        if origin.partition("://")[2].lower() != headers.get("host", "").lower():
            raise ApiError(
                403,
                "this web page may not send requests; remedy: start the server with "
                "--allowed-origin",
                kind="permission_error",
                code="wrong_origin",
            )

    def _user_of(self, headers: Headers) -> str:
        user = self._keys.user_of(headers.get("authorization", ""))
        if user is not None:
            return user
        error = ApiError(
            401,
            "the API key is missing or wrong; expected: a header `Authorization: Bearer KEY`; "
            "remedy: pass api_key= to the client",
            kind="authentication_error",
            code="invalid_api_key",
        )
        error.headers["www-authenticate"] = "Bearer"
        raise error


class BodyLimit:
    """Refuses bodies that are too large, without reading the rest of them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MOST_BYTES:
                problem = f"the body is too large; expected: at most {MOST_BYTES} bytes"
                error = ApiError(413, problem, code="body_too_large")
                error.headers["connection"] = "close"
                raise error
            return message

        await self._app(scope, limited, send)
