"""Errors of servers that several clients report in the same words."""

from jakiro.errors import ConfigError


def described(error: Exception) -> str:
    """Return the kind and the text of an error in one line."""
    return f"{type(error).__name__}: {str(error) or 'no further description'}"


def refused_key(url: str, status: int, *, has_key: bool) -> ConfigError:
    """Return the error for a server that does not accept the key.

    Args:
        url: address of the server.
        status: status of its answer.
        has_key: whether a key was sent.
    """
    return ConfigError(
        f"the server at {url} refuses the API key",
        expected="a key that the server accepts",
        got=f"status {status} with {'this key' if has_key else 'no key'}",
        remedy="set the environment variable JAKIRO_API_KEY to a key of the server",
    )
