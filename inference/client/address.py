"""Addresses of servers, as users write them."""

import httpx2

from jakiro.errors import ConfigError


def server_address(url: str) -> str:
    """Return an address without a slash at its end, and with `/v1` if it has no path."""
    if "@" in url:
        raise ConfigError(
            "the URL has a name or a password, which messages would show",
            expected="an address such as http://127.0.0.1:8000/v1",
            got="an address with @",
            remedy="pass the API key in the environment variable JAKIRO_API_KEY",
        )
    try:
        parsed = httpx2.URL(url.strip())
    except httpx2.InvalidURL:
        parsed = httpx2.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(
            "the URL is not the address of a server",
            expected="an address such as http://127.0.0.1:8000/v1",
            got=url,
        )
    return str(parsed).rstrip("/") + ("/v1" if parsed.path in ("", "/") else "")
