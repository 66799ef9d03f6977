"""Settings of the server."""

import os
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, FilePath, SecretStr, model_validator

from jakiro.errors import ConfigError
from jakiro.utils.settings import Settings


def keys_in_environment() -> tuple[SecretStr, ...]:
    """Return the keys in the environment variable JAKIRO_API_KEY, which are separated by commas."""
    keys = map(str.strip, os.environ.get("JAKIRO_API_KEY", "").split(","))
    return tuple(SecretStr(key) for key in keys if key)


def _keys_of_server() -> tuple[SecretStr, ...]:
    keys = keys_in_environment()
    if "JAKIRO_API_KEY" in os.environ and not keys:  # a mistake must not open the server
        raise ConfigError("JAKIRO_API_KEY has no key; set it to a long random text, or unset it")
    return keys


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to an address."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


class ServeSettings(Settings):
    """Address, limits and keys of a server."""

    host: str = "127.0.0.1"
    """Address to listen on. If other machines can reach it, requests require a key."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 for any free port."""
    model_name: str | None = None
    """Name of the model in requests; by default the last part of the target's path."""
    places: int = Field(8, ge=1)
    """Largest number of sequences that are decoded together, in each lane: if the drafter has other
    trees for greedy requests, they have a lane of their own."""
    capacity: int = Field(4096, ge=2)
    """Largest number of tokens of a sequence, including its prompt."""
    queue: int = Field(64, ge=0)
    """Largest number of sequences beyond --places that wait."""
    api_keys: tuple[SecretStr, ...] = Field(default_factory=_keys_of_server)
    """Keys, one of which each request must contain; by default those in the environment variable
    JAKIRO_API_KEY. If there are none, all requests are accepted."""
    keys_file: FilePath | None = None
    """YAML file with the hashes of further keys by the names of their users."""
    allowed_hosts: tuple[Annotated[str, Field(pattern=r"^(\*|(\*\.)?[^*]+)$")], ...] = ()
    """Name of the server in the header `Host`, besides those of this machine; `*` for all names. If
    there is none, a server that other machines can connect to accepts all names."""
    allowed_origins: tuple[str, ...] = ()
    """Origin of web pages that may send requests."""
    request_seconds: float = Field(600.0, gt=0)
    """Largest number of seconds from the acceptance of a request to its last token."""
    remote_sessions: int = Field(0, ge=0)
    """Largest number of texts at the same time whose drafts other machines send, see
    `jakiro connect`; 0 for none."""
    remote_idle_seconds: float = Field(120.0, gt=0, allow_inf_nan=False)
    """Seconds without a request after which the caches of such a text are freed."""
    playground: bool = True
    """Serve the playground, a web page at `/`."""
    adapt: Literal["off", "shared"] = "off"
    """`shared`: the drafter learns from the texts of all users; `off`: no text is kept to
    learn from."""
    adapt_folder: Path | None = None
    """Folder for the versions of the drafter's weights; by default, they are lost at the end."""
    adapt_tokens: int = Field(500_000, ge=1)
    """Largest number of tokens of recent texts, which are kept in memory."""
    adapt_hours: float = Field(24.0, gt=0, allow_inf_nan=False)
    """Number of hours after which a text is forgotten."""
    adapt_every: int = Field(64, ge=1)
    """Number of new texts after which the drafter learns."""
    adapt_idle_seconds: float = Field(5.0, ge=0)
    """Seconds without a request after which learning begins or continues."""
    drain_seconds: float = Field(30.0, ge=0)
    """Seconds that running requests may take after SIGTERM."""

    @model_validator(mode="after")
    def _only_with_a_key_beyond_this_machine(self) -> "ServeSettings":
        if not (self.api_keys or self.keys_file) and not is_loopback(self.host):
            raise ValueError(
                f"--host {self.host} accepts requests from other machines, which requires a key; "
                "set the environment variable JAKIRO_API_KEY, pass --keys-file, or use "
                "--host 127.0.0.1"
            )
        return self
