"""Settings of the server."""

from ipaddress import ip_address

from pydantic import Field, SecretStr, model_validator

from jakiro.utils.settings import Settings


class ServeSettings(Settings):
    """Address, limits and keys of a server."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 for any free port."""
    model_name: str | None = None
    """Name of the model in requests and responses; None for the last part of the target's path."""
    places: int = Field(8, ge=1)
    """Largest number of sequences of each lane that are decoded together."""
    capacity: int = Field(4096, ge=2)
    """Largest number of tokens of a sequence, including its prompt."""
    queue: int = Field(64, ge=0)
    """Largest number of sequences of each lane that wait for a free place."""
    api_keys: tuple[SecretStr, ...] = ()
    """Keys one of which each request must contain; none to accept all requests."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may send requests."""
    max_body_bytes: int = Field(4_000_000, ge=1)
    """Largest size of a request body in bytes."""
    playground: bool = True
    """Whether to serve the playground, a web page at `/`."""
    drain_seconds: float = Field(30.0, ge=0)
    """Seconds that running requests may take after SIGTERM."""

    @model_validator(mode="after")
    def _only_with_a_key_beyond_this_machine(self) -> "ServeSettings":
        if not self.api_keys and not _is_loopback(self.host):
            raise ValueError(
                f"--host {self.host} accepts requests from other machines, which requires a key; "
                "set the environment variable JAKIRO_API_KEY, or use --host 127.0.0.1"
            )
        return self


def _is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to an address."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
