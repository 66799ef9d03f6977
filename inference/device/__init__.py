"""Decoding on a device that drafts by itself, with the target on a server that verifies."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inference.device.decoder import RemoteDecoder

__all__ = ["RemoteDecoder"]


def __getattr__(name: str) -> object:
    """Import the decoder when it is first used, so that importing the package stays fast."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("inference.device.decoder"), name)
