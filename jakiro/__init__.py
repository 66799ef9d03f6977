"""Lossless speculative decoding for Hugging Face causal LMs, and the drafters that it needs.

This module exports the names that most programs need. Each is imported when it is first used, so
that importing the package stays fast.
"""

import sys
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inference.conversation import Conversation
    from inference.decoder import SpeculativeDecoder
    from inference.drafters.aded import AdedDrafter
    from inference.drafters.lookup import LookupDrafter
    from jakiro.config import JakiroConfig
    from jakiro.drafter import JakiroDrafter

__all__ = [
    "AdedDrafter",
    "Conversation",
    "JakiroConfig",
    "JakiroDrafter",
    "LookupDrafter",
    "SpeculativeDecoder",
    "__version__",
]

_HOMES = {
    "AdedDrafter": "inference.drafters.aded",
    "Conversation": "inference.conversation",
    "JakiroConfig": "jakiro.config",
    "JakiroDrafter": "jakiro.drafter",
    "LookupDrafter": "inference.drafters.lookup",
    "SpeculativeDecoder": "inference.decoder",
}

try:
    __version__ = metadata.version("jakiro")
except metadata.PackageNotFoundError:  # a checkout that is on the path but was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> object:
    """Import an exported name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        _refuse_foreign_package(_HOMES[name].partition(".")[0], error)
        raise


def _refuse_foreign_package(package: str, cause: ModuleNotFoundError) -> None:
    """Raise an error if another module has the name of a package that Jakiro consists of."""
    file = getattr(sys.modules.get(package), "__file__", None)
    if file is not None and Path(file).parents[1] != Path(__file__).parents[1]:
        raise ImportError(
            f"Jakiro's package {package!r} cannot be imported, because {file} has the same name "
            "and comes first on the path; rename that file or folder"
        ) from cause


def __dir__() -> list[str]:
    """Return the exported names, which interactive sessions complete."""
    return sorted(__all__)
