"""The families of published drafters, recognized by the names and shapes of their tensors."""

import re
from collections.abc import Callable, Iterable

from jakiro.exchange.checkpoint import DraftCheckpoint
from jakiro.exchange.eagle import read_eagle, read_published_jakiro
from jakiro.exchange.eagle3 import read_eagle3
from jakiro.exchange.plan import ImportPlan
from jakiro.exchange.table import cannot_import

Reader = Callable[[DraftCheckpoint], ImportPlan]

_KNOWN = "a drafter of EAGLE-1, EAGLE-2, HASS, EAGLE-3 or Jakiro"
_MTP = re.compile(r"mtp\.|mtp_layers\.|.*\.eh_proj\.")
_MEDUSA = re.compile(r"(medusa_head\.)?\d+\.\d+\.linear\.|blocks\.\d+\.layers\.")


def plan_import(checkpoint: DraftCheckpoint) -> ImportPlan:
    """Return the plan for importing a published drafter.

    Args:
        checkpoint: published drafter.

    Raises:
        CheckpointError: the drafter belongs to no family that can be imported, or is not complete,
            or has parts that cannot be imported.
    """
    return _reader_for(checkpoint)(checkpoint)


def _reader_for(checkpoint: DraftCheckpoint) -> Reader:
    names = checkpoint.tensors
    if _any("layers.0.mlp_moe.", names):
        return read_published_jakiro
    if not names.keys().isdisjoint(("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight")):
        return read_eagle3
    fused = names.get("fc.weight")
    if fused is not None and fused.shape[1:] == (2 * fused.shape[0],):
        return read_eagle
    raise _unknown(checkpoint)


def _unknown(checkpoint: DraftCheckpoint) -> Exception:
    names = checkpoint.tensors
    if "Ekv2E.weight" in names:
        got = "a drafter of Mixture of Attentions, whose layers differ from those of this project"
    elif any(_MTP.match(name) for name in names):
        got = "an MTP head, which is part of its target"
    elif any(_MEDUSA.match(name) for name in names) or _any("medusa_", checkpoint.config):
        got = "Medusa heads, which draft without reading the drafted tokens"
    else:
        got = f"tensors such as {', '.join(sorted(names)[:3])}"
    return cannot_import(checkpoint.source, _KNOWN, got)


def _any(prefix: str, names: Iterable[str]) -> bool:
    return any(name.startswith(prefix) for name in names)
