"""Lossless speculative decoding: decoder, drafters, decode engine, and measurements."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inference.conversation import Conversation
    from inference.decoder import SpeculativeDecoder

__all__ = ["Conversation", "SpeculativeDecoder"]

_HOMES = {
    "Conversation": "inference.conversation",
    "SpeculativeDecoder": "inference.decoder",
}


def __getattr__(name: str) -> object:
    """Import an exported name when it is first used, so that importing the package stays fast."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Return the exported names, for completion in interactive sessions."""
    return sorted(__all__)
