"""API keys, which are compared in constant time."""

import hmac
from collections.abc import Iterable
from hashlib import sha256

_SCHEME = "bearer"


class ApiKeys:
    """The keys of a server.

    Args:
        keys: accepted keys; none to accept requests without a key.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def accept(self, authorization: str) -> bool:
        """Return whether a request may be answered.

        The time of the comparison depends neither on the key that is sent nor on which key fits.

        Args:
            authorization: value of the header `Authorization`, empty if there is none.
        """
        if not self._digests:
            return True
        scheme, _, key = authorization.partition(" ")
        sent = _digest(key.strip())
        fits = [hmac.compare_digest(sent, own) for own in self._digests]
        return any(fits) and scheme.lower() == _SCHEME


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()
