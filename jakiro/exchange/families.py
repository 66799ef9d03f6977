"""The families of published drafters, recognized by the names and shapes of their tensors."""

from collections.abc import Callable, Iterable

from jakiro.config import JakiroConfig
from jakiro.exchange.checkpoint import DraftCheckpoint
from jakiro.exchange.eagle import read_eagle, read_published_jakiro
from jakiro.exchange.eagle3 import read_eagle3
from jakiro.exchange.mapping import cannot_import
from jakiro.exchange.mixture_of_attentions import read_mixture_of_attentions
from jakiro.exchange.plan import ImportPlan

Reader = Callable[[DraftCheckpoint], ImportPlan]

_KNOWN = "a drafter of EAGLE-1, EAGLE-2, HASS, EAGLE-3, Mixture of Attentions or Jakiro"


def plan_import(checkpoint: DraftCheckpoint) -> ImportPlan:
    """Return the plan for importing a published drafter."""
    return _reader_for(checkpoint)(checkpoint)


def _reader_for(checkpoint: DraftCheckpoint) -> Reader:
    names = checkpoint.tensors
    if checkpoint.config.get("model_type") == JakiroConfig.model_type:
        raise cannot_import(
            checkpoint.source,
            "a drafter of another project",
            "a drafter of this project",
            "use it as it is: `jakiro generate`, `jakiro bench` and `jakiro train` read it",
        )
    if _any("layers.0.mlp_moe.", names):
        return read_published_jakiro
    if not names.keys().isdisjoint(("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight")):
        return read_eagle3
    if "Ekv2E.weight" in names or _any("cross_attention.", names):
        return read_mixture_of_attentions
    fused = names.get("fc.weight")
    if fused is not None and len(fused.shape) == 2 and fused.shape[1] == 2 * fused.shape[0]:
        return read_eagle
    got = f"tensors such as {', '.join(sorted(names)[:3])}"
    raise cannot_import(checkpoint.source, _KNOWN, got)


def _any(prefix: str, names: Iterable[str]) -> bool:
    return any(name.startswith(prefix) for name in names)
