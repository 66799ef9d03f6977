"""The families of published drafters, recognized by the names and shapes of their tensors."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jakiro.config import JakiroConfig
from jakiro.exchange.checkpoint import DraftCheckpoint
from jakiro.exchange.dflash import NAMES, block_values, read_dflash
from jakiro.exchange.eagle import read_eagle, read_published_jakiro
from jakiro.exchange.eagle3 import read_eagle3
from jakiro.exchange.mapping import cannot_import
from jakiro.exchange.mixture_of_attentions import read_mixture_of_attentions
from jakiro.exchange.plan import ImportPlan

Reader = Callable[[DraftCheckpoint], ImportPlan]

_KNOWN = (
    "a drafter of EAGLE-1, EAGLE-2, HASS, EAGLE-3, DFlash, JetSpec, DSpark, Mixture of Attentions "
    "or Jakiro"
)
# Drafters that cannot be imported, by what the names of their architectures or tensors contain.
_REFUSED = {
    "dflash2": "DFlash2, whose layers have convolutions and whose drafts a selector chooses",
    "lilicorr": "LiLiCorr, whose drafts a network of its own corrects",
    "domino": "Domino, whose drafts a recurrent network corrects",
    "eagle4": "EAGLE-4",
    "peagle": "P-EAGLE, which drafts from a trained hidden state of a mask",
    "mtp": "an MTP head, which is a layer of its target",
}
_REFUSED_TENSORS = {  # starts of names
    "candidate_selector.": "dflash2",
    "mask_hidden": "peagle",
    "mtp.": "mtp",
    "embed_proj.": "domino",
}
_NAME_KEYS = ("model_type", "speculators_model_type", "projector_type", "spec_decode_type")


def plan_import(checkpoint: DraftCheckpoint) -> ImportPlan:
    """Return the plan for importing a published drafter."""
    if checkpoint.config.get("model_type") == JakiroConfig.model_type:
        raise cannot_import(
            checkpoint.source,
            "a drafter of another project",
            "a drafter of this project",
            "use it as it is: `jakiro generate`, `jakiro bench` and `jakiro train` read it",
        )
    if kind := _refused_kind(checkpoint.config, checkpoint.tensors):
        raise cannot_import(checkpoint.source, _KNOWN, kind)
    return _reader_for(checkpoint)(checkpoint)


def _reader_for(checkpoint: DraftCheckpoint) -> Reader:
    names = checkpoint.tensors
    if _any("layers.0.mlp_moe.", names):
        return read_published_jakiro
    if not names.keys().isdisjoint(("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight")):
        return read_eagle3
    if names.keys() >= NAMES:
        return read_dflash
    if "Ekv2E.weight" in names or _any("cross_attention.", names):
        return read_mixture_of_attentions
    fused = names.get("fc.weight")
    if fused is not None and len(fused.shape) == 2 and fused.shape[1] == 2 * fused.shape[0]:
        return read_eagle
    got = f"tensors such as {', '.join(sorted(names)[:3])}"
    raise cannot_import(checkpoint.source, _KNOWN, got)


def _refused_kind(config: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """Return what a published drafter is if it is of a kind that cannot be imported."""
    values = block_values(config)
    words = [*(values.get("architectures") or ()), *(values.get(key) for key in _NAME_KEYS)]
    words += [kind for start, kind in _REFUSED_TENSORS.items() if _any(start, names)]
    words += ["peagle"] if values.get("parallel_drafting") else []
    kinds = " ".join(map(str, words)).lower().replace("-", "").replace("_", "")
    return next((text for kind, text in _REFUSED.items() if kind in kinds), None)


def _any(prefix: str, names: Iterable[str]) -> bool:
    return any(name.startswith(prefix) for name in names)
