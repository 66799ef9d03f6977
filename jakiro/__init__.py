"""A drafter for lossless speculative decoding: an attention trunk and a mixture of experts."""

from importlib import import_module, metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jakiro.config import JakiroConfig
    from jakiro.drafter import JakiroDrafter

__all__ = ["JakiroConfig", "JakiroDrafter", "__version__"]

_HOMES = {"JakiroConfig": "jakiro.config", "JakiroDrafter": "jakiro.drafter"}

try:
    __version__ = metadata.version("jakiro")
except metadata.PackageNotFoundError:  # a checkout that is on the path but was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> object:
    """Import an exported name on first use, so that importing the package stays fast."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Return the exported names, which interactive sessions complete."""
    return sorted(__all__)
