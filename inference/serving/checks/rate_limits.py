"""Rates of requests and tokens, limited by token buckets."""

import math
import time
from collections.abc import Callable

from inference.serving.api_error import ApiError

_SECONDS = 60.0
_MAX_ADDRESSES = 10_000  # largest number of addresses whose failures are counted


class TokenBucket:
    """Units that are taken at any time, and that are given back at a constant rate.

    At first, and after a minute without use, the units of a whole minute can be taken at once. More
    can be taken than there are, because the number of tokens of a request is not known before its
    end; the next unit is then available later.

    Args:
        per_minute: number of units that are given back in a minute; may be a fraction.
        clock: function that returns the current time in seconds.
    """

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = per_minute / _SECONDS
        self._capacity = max(per_minute, 1.0)
        self._level = self._capacity
        self._clock = clock
        self._updated = clock()

    @property
    def level(self) -> float:
        """The number of units that can be taken now; negative if too many were taken."""
        now = self._clock()
        self._level = min(self._level + (now - self._updated) * self._rate, self._capacity)
        self._updated = now
        return self._level

    def seconds_until(self, units: float) -> float:
        """Return the seconds until a number of units can be taken.

        Args:
            units: number of units, at most those of a minute.
        """
        return max(units - self.level, 0.0) / self._rate

    def take(self, units: float) -> None:
        """Take units, even if fewer are left.

        Args:
            units: number of units.
        """
        self._level = self.level - units


class RateLimit:
    """The rates of one user.

    Args:
        requests_per_minute: largest rate of requests; None for no limit.
        tokens_per_minute: largest rate of tokens of prompts and texts; None for no limit.
        clock: function that returns the current time in seconds.
    """

    def __init__(
        self,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._requests, self._tokens = (
            None if rate is None else TokenBucket(rate, clock)
            for rate in (requests_per_minute, tokens_per_minute)
        )

    def begin(self) -> None:
        """Count a request, whose tokens are counted later.

        Raises:
            ApiError: the user has sent too many requests, or used too many tokens.
        """
        _check("requests", self._requests)
        self.check_tokens()
        if self._requests is not None:
            self._requests.take(1.0)

    def check_tokens(self) -> None:
        """Check the number of tokens before another part of a text that was begun.

        Raises:
            ApiError: the user has used too many tokens.
        """
        _check("tokens", self._tokens)

    def count_tokens(self, count: int) -> None:
        """Count the tokens of a request.

        Args:
            count: number of tokens of its prompts or of its texts.
        """
        if self._tokens is not None:
            self._tokens.take(float(count))


def _check(name: str, bucket: TokenBucket | None) -> None:
    if bucket is not None and (seconds := bucket.seconds_until(1.0)) > 0:
        raise too_many(name, seconds)


class FailureLimit:
    """The rate of requests with wrong keys from each address.

    Args:
        per_minute: largest rate of such requests from one address.
        clock: function that returns the current time in seconds.
    """

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._buckets: dict[str, TokenBucket] = {}  # the address with the last failure is last

    def check(self, address: str) -> None:
        """Check an address whose key is wrong, or new at this address.

        Args:
            address: address of a client.

        Raises:
            ApiError: too many requests from this address had a wrong key.
        """
        bucket = self._buckets.get(address)
        if bucket is not None and (seconds := bucket.seconds_until(1.0)) > 0:
            raise too_many("requests with a wrong key", seconds)

    def count(self, address: str) -> None:
        """Count a request with a wrong key.

        Args:
            address: address of the client.
        """
        bucket = self._buckets.pop(address, None) or TokenBucket(self._per_minute, self._clock)
        bucket.take(1.0)
        self._buckets[address] = bucket
        if len(self._buckets) > _MAX_ADDRESSES:
            del self._buckets[next(iter(self._buckets))]


def too_many(name: str, seconds: float) -> ApiError:
    """Return the error for a rate that is too high.

    Args:
        name: the units that were counted.
        seconds: seconds after which the client may try again.
    """
    wait = math.ceil(seconds)
    return ApiError(
        429,
        f"too many {name} in a minute; expected: at most the limit; got: more; "
        f"remedy: try again after {wait} seconds",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        retry_after=wait,
    )
