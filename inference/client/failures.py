"""Errors and waits of servers that several clients share."""

import math
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from jakiro.errors import ConfigError

_DEFAULT_SECONDS = 1.0  # if the server does not say how long to wait


def described(error: Exception) -> str:
    """Return the kind and the text of an error in one line."""
    return f"{type(error).__name__}: {str(error) or 'no further description'}"


def refused_key(url: str, status: int, *, has_key: bool) -> ConfigError:
    """Return the error for a server that does not accept the key."""
    return ConfigError(
        f"the server at {url} refuses the API key",
        expected="a key that the server accepts",
        got=f"status {status} with {'this key' if has_key else 'no key'}",
        remedy="set the environment variable JAKIRO_API_KEY to a key of the server",
    )


def seconds_to_wait(retry_after: str | None, now: datetime | None = None) -> float:
    """Return the seconds that a header `Retry-After` asks for; one second if it is unreadable."""
    try:
        seconds = float(retry_after or _DEFAULT_SECONDS)
        return _DEFAULT_SECONDS if math.isnan(seconds) else max(seconds, 0.0)
    except ValueError:
        pass
    try:
        date = parsedate_to_datetime(str(retry_after))
    except ValueError:
        return _DEFAULT_SECONDS
    aware = date if date.tzinfo else date.replace(tzinfo=UTC)
    return max((aware - (now or datetime.now(UTC))).total_seconds(), 0.0)
