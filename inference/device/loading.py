"""Drafters for a target that is on a server, by their names, and whether they fit the server."""

from pathlib import Path
from typing import Any

import torch

from inference.drafters.aded.drafter import AdedDrafter
from inference.drafters.delegating import DelegatingDrafter
from inference.drafters.lookup import LookupDrafter
from inference.drafters.names import ADED, LM, LOOKUP, UntrainedName
from inference.drafters.small_lm import SmallLMDrafter
from inference.drafters.trained.drafter import TrainedDrafter, default_tree
from inference.drafters.trained.memory import encoder_fingerprint, memory_drafter
from inference.protocol import Drafter
from inference.remote.messages import MemoryRequest, RowEncoding, VerifierInfo
from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError, TargetMismatch
from jakiro.target.ends import DESCRIPTION_FILE, read_device_target
from jakiro.target.record import tokenizer_fingerprint
from jakiro.utils.packaged import packaged_drafter
from jakiro.utils.pretrained import load_causal_lm, load_tokenizer, torch_dtype

NONE = "none"

_MOST_PADDING = 4_096  # largest number of ids that a target has beyond those of a smaller model


def device_drafter(name: str, info: VerifierInfo, **load: Any) -> Drafter | None:
    """Return a drafter that needs no target on this machine; None for the name `none`.

    Args:
        name: `lookup`, `aded`, `lm=MODEL` (a small model with the target's tokenizer), `none`, or a
            folder that `jakiro export --to device` has written.
        **load: arguments of `load_causal_lm` for the small model; `dtype` and `device` also apply
            to an exported drafter.
    """
    name = name.removeprefix("drafter=")
    parsed = UntrainedName.parse(name)
    if name == NONE:
        return None
    if name == LOOKUP:
        return LookupDrafter()
    if name == ADED:
        return AdedDrafter()
    if parsed is not None and parsed.kind == LM:
        return _small_lm(str(parsed.path), info, load)
    if (exported := exported_folder(name)) is not None:
        return _exported(exported, **load)
    if (Path(name) / "config.json").is_file() or packaged_drafter(name) is not None:
        raise ConfigError(
            f"the drafter {name} was not exported for a machine without its target",
            got=f"a drafter or a model without {DESCRIPTION_FILE}",
            remedy=f"run jakiro export --to device {name} --out FOLDER where the target is",
        )
    raise ConfigError(
        f"the drafter {name} cannot draft on this machine for a target on a server",
        expected=f"{LOOKUP}, {ADED}, {LM}=MODEL, {NONE}, or a folder of jakiro export --to device",
        remedy="use one of these, or let the server draft with jakiro serve --drafter",
    )


def exported_folder(name: str) -> Path | None:
    """Return the folder of a name if `jakiro export --to device` has written it, or None."""
    folder = Path(name.removeprefix("drafter="))
    return folder if (folder / DESCRIPTION_FILE).is_file() else None


def check_reads_tokens(drafter: Drafter) -> None:
    """Raise an error if a drafter needs the target's hidden states."""
    if drafter.needs or drafter.hidden_states:
        raise ConfigError(
            f"{drafter!r} needs the target's hidden states, which stay on the server",
            remedy="use lookup, aded or lm=MODEL, or let the server draft with jakiro serve "
            "--drafter",
        )


def check_writes_alone(drafter: Drafter | None) -> None:
    """Raise an error if there is no drafter that could write without a connection."""
    if drafter is None:
        raise ConfigError(
            "nothing can be written without a drafter while the server cannot be reached",
            remedy="choose lm=MODEL or a trained drafter, or wait for the server without `offline`",
        )


def memory_request(
    drafter: Drafter | None, info: VerifierInfo, encoding: RowEncoding
) -> MemoryRequest | None:
    """Return the memory to ask the server for; None if the drafter reads tokens alone."""
    if not isinstance(drafter, TrainedDrafter):
        if encoding != "exact":
            raise ConfigError(
                f"memory is encoded as {encoding} only for a trained drafter",
                remedy="use a folder of jakiro export --to device, or leave out the encoding",
            )
        return None
    if memory_drafter(drafter) is None:
        raise ConfigError(
            "this drafter computes with the target's last layers, which stay on the server",
            got=f"tail_layers: {drafter.model.config.settings.tail_layers}",
            remedy="let the server draft with jakiro serve --drafter, or train another drafter",
        )
    if info.memory is None:
        raise ConfigError(
            f"the server of {info.model} encodes no memory for a trained drafter",
            remedy="start it with jakiro serve --drafter DRAFTER --remote-sessions 8",
        )
    return MemoryRequest(encoder=encoder_fingerprint(drafter.model), encoding=encoding)


def check_vocab_size(drafter: Drafter | None, info: VerifierInfo) -> None:
    """Raise an error if a small model cannot belong to a target with the server's vocabulary.

    The embeddings of models with the same tokenizer may be padded to different sizes.
    """
    while isinstance(drafter, DelegatingDrafter):
        drafter = drafter.drafter
    if not isinstance(drafter, SmallLMDrafter):
        return
    least, most = drafter.vocab_size, drafter.model.spec.vocab_size + _MOST_PADDING
    if not least <= info.vocab_size <= most:
        raise TargetMismatch(
            f"the vocabulary of the server's target {info.model} does not fit the drafter",
            expected=f"{least} to {most} token ids",
            got=info.vocab_size,
            remedy="use a smaller model of the target's family",
        )


def _exported(
    folder: Path,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    **_: Any,
) -> TrainedDrafter:
    """Return the drafter of an exported folder, on its device and in the dtype of its target."""
    model = JakiroDrafter.from_pretrained(folder)
    given = None if dtype is None else torch_dtype(dtype)
    chosen = given if isinstance(given, torch.dtype) else None  # None for `auto`
    target = read_device_target(folder, model.draft_ids, device or "cpu", chosen)
    model = model.eval().to(device=target.device, dtype=target.dtype)
    return TrainedDrafter(model, target, default_tree(model))


def _small_lm(path: str, info: VerifierInfo, load: dict[str, Any]) -> SmallLMDrafter:
    tokenizer = load_tokenizer(path)
    if tokenizer_fingerprint(tokenizer) != info.tokenizer:
        raise TargetMismatch(
            f"the small language model {path} does not have the tokenizer of the server's target",
            expected=f"the vocabulary of {info.model}",
            got=f"{len(tokenizer)} tokens with a different vocabulary hash",
            remedy="use a smaller model of the target's family",
        )
    model = load_causal_lm(path, "the small language model", **load)
    drafter = SmallLMDrafter(model, model)
    drafter.vocab_size = min(drafter.vocab_size, info.vocab_size)
    return drafter
