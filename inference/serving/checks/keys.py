"""API keys, which are compared in constant time, and the rates of their users."""

import hmac
import re
import secrets
import stat
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import yaml
from pydantic import Field, SecretStr

from inference.serving.checks.rate_limits import RateLimit
from jakiro.errors import ConfigError
from jakiro.utils.logs import get_logger
from jakiro.utils.settings import Settings, load_settings

_logger = get_logger(__name__)

_SCHEME = "bearer"
_DIGEST = re.compile("[0-9a-f]{64}")
_NUM_BYTES = 32  # random bytes of a new key


class KeySettings(Settings):
    """One key in a file of keys."""

    sha256: SecretStr
    """SHA-256 of the key, in hexadecimal form."""
    requests_per_minute: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Largest rate of requests; None for the server's own."""
    tokens_per_minute: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Largest rate of tokens of prompts and texts; None for the server's own."""


class KeysFile(Settings):
    """A file of keys."""

    keys: dict[str, KeySettings] = Field(min_length=1)
    """The keys by the names of their users."""


class User(NamedTuple):
    """A user with a key, or all users together if there are no keys.

    Attributes:
        name: name of the user in the file of keys.
        rate: limits of the user's rates.
    """

    name: str
    rate: RateLimit


class ApiKeys:
    """The keys of a server.

    Args:
        requests_per_minute: largest rate of requests of each user; None for no limit.
        tokens_per_minute: largest rate of tokens of each user; None for no limit.
        keys: accepted keys, whose users have no names.
        named: accepted keys by the names of their users.

    Raises:
        ConfigError: a key cannot be sent in a header, or the hash of a key is wrong.
    """

    def __init__(
        self,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        keys: Iterable[str] = (),
        named: dict[str, KeySettings] | None = None,
    ) -> None:
        own = requests_per_minute, tokens_per_minute
        self._users = [
            (_digest(_sendable(key)), User(f"key {number}", RateLimit(*own)))
            for number, key in enumerate(keys, 1)
        ]
        for name, key in (named or {}).items():
            rate = RateLimit(key.requests_per_minute or own[0], key.tokens_per_minute or own[1])
            self._users.append((_from_hex(name, key.sha256), User(name, rate)))
        self._everyone = User("everyone", RateLimit(*own))

    @property
    def are_several(self) -> bool:
        """Whether there are several users, whose texts are kept apart."""
        return len(self._users) > 1

    def user_of(self, authorization: str) -> User | None:
        """Return the user of a request, or None if it may not be answered.

        The time of the comparison depends neither on the key that is sent nor on which key fits.

        Args:
            authorization: value of the header `Authorization`, empty if there is none.
        """
        if not self._users:
            return self._everyone
        scheme, _, key = authorization.partition(" ")
        sent = _digest(key.strip())
        fits = [user for own, user in self._users if hmac.compare_digest(sent, own)]
        return fits[0] if fits and scheme.lower() == _SCHEME else None


def read_keys(path: Path) -> dict[str, KeySettings]:
    """Return the keys in a YAML file by the names of their users.

    Args:
        path: file of the form of `KeysFile`.

    Raises:
        ConfigError: the file cannot be read, has another form, or can be changed by other users of
            this machine.
    """
    found = load_settings(KeysFile, path).keys
    mode = path.stat().st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"other users of this machine can change {path}",
            expected="a file that only its owner can write to",
            got=f"the mode {stat.filemode(mode)}",
            remedy=f"chmod 600 {path}",
        )
    if mode & stat.S_IROTH:
        _logger.warning("all users of this machine can read the hashes of the keys in %s", path)
    return found


def entry_of(name: str, digest: str) -> str:
    """Return the lines of a file of keys for one key.

    Args:
        name: name of the user.
        digest: SHA-256 of the key, in hexadecimal form.
    """
    lines: str = yaml.safe_dump({"keys": {name: {"sha256": digest}}}, allow_unicode=True)
    return lines


def new_key() -> tuple[str, str]:
    """Return a random key and its SHA-256 in hexadecimal form."""
    key = secrets.token_urlsafe(_NUM_BYTES)
    return key, _digest(key).hex()


def _from_hex(name: str, digest: SecretStr) -> bytes:
    """Return the bytes of a hash; the error does not show the text, which may be the key itself."""
    text = digest.get_secret_value()
    if not _DIGEST.fullmatch(text):
        raise ConfigError(
            f"the SHA-256 of {name} is wrong",
            expected="64 hexadecimal digits",
            got=f"{len(text)} characters",
            remedy=f"make a key with jakiro serve --new-key {name}",
        )
    return bytes.fromhex(text)


def _sendable(key: str) -> str:
    """Return a key that can be sent in a header; the error does not show the key."""
    strange = sum(not (each.isascii() and each.isprintable()) for each in key)
    if strange or key != key.strip():
        raise ConfigError(
            "clients cannot send one of the keys",
            expected="printable characters of ASCII",
            got=f"{strange} other characters" if strange else "spaces around a key",
            remedy="make a key with jakiro serve --new-key NAME",
        )
    return key


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()
