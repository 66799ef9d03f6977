"""Settings of the server."""

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, model_validator

from inference.serving.access import is_loopback
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
    """Largest number of sequences that are decoded together, in each lane: if the drafter has other
    trees for greedy requests, they have a lane of their own."""
    capacity: int = Field(4096, ge=2)
    """Largest number of tokens of a sequence, including its prompt."""
    queue: int = Field(64, ge=0)
    """Largest number of sequences of each lane that wait for a free place."""
    api_keys: tuple[SecretStr, ...] = ()
    """Keys, one of which each request must contain; none to accept all requests."""
    keys_file: Path | None = None
    """YAML file with the hashes of further keys by the names of their users; None for no file."""
    tls_cert: Path | None = None
    """PEM file with the certificate of the server, and those that lead to its authority; None for
    connections without TLS."""
    tls_key: Path | None = None
    """PEM file with the key of the certificate."""
    allowed_hosts: tuple[str, ...] = ()
    """Names of the server in the header `Host`, besides those of this machine; `*` for all names.
    If there are none, a server that other machines can connect to accepts all names."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may send requests."""
    max_body_bytes: int = Field(1_048_576, ge=1)
    """Largest size of a request body in bytes."""
    request_seconds: float = Field(600.0, gt=0)
    """Largest number of seconds from the acceptance of a request to its last token."""
    remote_sessions: int = Field(0, ge=0)
    """Largest number of simultaneous texts whose drafts are sent by other machines; 0 for none."""
    remote_sessions_per_key: int = Field(4, ge=1)
    """Largest number of texts of each key whose drafts are sent by other machines."""
    remote_idle_seconds: float = Field(120.0, gt=0, allow_inf_nan=False)
    """Seconds without a request after which the caches of such a text are freed."""
    playground: bool = True
    """Whether to serve the playground, a web page at `/`."""
    adapt: Literal["off", "shared"] = "off"
    """`shared`: the drafter learns from the texts of all users; `off`: no text is kept to
    learn from."""
    adapt_folder: Path | None = None
    """Folder for the versions of the drafter's weights; None for one that is removed at the end."""
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

    @property
    def sends_keys_unencrypted(self) -> bool:
        """Whether keys cross a network without TLS, unless a proxy adds it."""
        return not is_loopback(self.host) and self.tls_cert is None

    @model_validator(mode="after")
    def _a_certificate_has_a_key(self) -> "ServeSettings":
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key must be given together")
        return self

    @model_validator(mode="after")
    def _only_with_a_key_beyond_this_machine(self) -> "ServeSettings":
        if not (self.api_keys or self.keys_file) and not is_loopback(self.host):
            raise ValueError(
                f"--host {self.host} accepts requests from other machines, which requires a key; "
                "set the environment variable JAKIRO_API_KEY, pass --keys-file, or use "
                "--host 127.0.0.1"
            )
        return self
