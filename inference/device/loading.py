"""Drafters by their names, for a target that is on a server."""

from pathlib import Path
from typing import Any

import torch

from inference.drafters.aded.drafter import AdedDrafter
from inference.drafters.aded.file import vocabulary_size
from inference.drafters.delegating import DelegatingDrafter
from inference.drafters.lookup import LookupDrafter
from inference.drafters.names import ADED, LM, LOOKUP, UntrainedName
from inference.drafters.small_lm import SmallLMDrafter
from inference.drafters.trained.drafter import TrainedDrafter, default_tree
from inference.protocol import Drafter
from inference.remote.messages import VerifierInfo
from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError, TargetMismatch
from jakiro.target.device_target import DESCRIPTION_FILE, read_device_target
from jakiro.target.record import tokenizer_fingerprint
from jakiro.utils.packaged import packaged_drafter
from jakiro.utils.pretrained import load_causal_lm, load_tokenizer, torch_dtype

NONE = "none"
DEVICE_DRAFTERS = f"{LOOKUP}, {ADED}, {LM}=MODEL, {NONE}, or a folder of jakiro export --to device"

_MOST_PADDING = 4_096  # largest number of ids that a target has beyond those of a smaller model


def device_drafter(name: str, info: VerifierInfo, **load: Any) -> Drafter | None:
    """Return a drafter that needs no target on this machine; None for the name `none`.

    Args:
        name: `lookup`, `aded`, `lm=MODEL` (a small model with the target's tokenizer), `none`, or a
            folder that `jakiro export --to device` has written.
        **load: arguments of `load_causal_lm` for the small model; `dtype` and `device` also apply
            to an exported drafter.
    """
    parsed = UntrainedName.parse(name)
    if name == LOOKUP:
        return LookupDrafter()
    if name == ADED:
        return AdedDrafter()
    if parsed is not None and parsed.kind == LM:
        return _small_lm(str(parsed.path), info, load)
    if name == NONE:
        return None
    if (exported := exported_folder(name)) is not None:
        return _exported(exported, info, **load)
    if (_folder(name) / "config.json").is_file() or packaged_drafter(name) is not None:
        raise ConfigError(
            f"the drafter {name} was not exported for a machine without its target",
            expected=f"a folder of jakiro export --to device, with {DESCRIPTION_FILE}",
            got="a drafter or a model without this file",
            remedy=f"run jakiro export --to device {name} --out FOLDER where the target is",
        )
    raise ConfigError(
        f"the drafter {name} cannot draft on this machine for a target on a server",
        expected=DEVICE_DRAFTERS,
        got=name,
        remedy="use one of these, or let the server draft with jakiro serve --drafter",
    )


def exported_folder(name: str) -> Path | None:
    """Return the folder of a name if `jakiro export --to device` has written it, or None."""
    folder = _folder(name)
    return folder if (folder / DESCRIPTION_FILE).is_file() else None


def _folder(name: str) -> Path:
    return Path(name.removeprefix("drafter="))


def check_vocab_size(drafter: Drafter | None, info: VerifierInfo) -> None:
    """Raise an error if a drafter cannot belong to a target with the server's vocabulary.

    The embeddings of models with the same tokenizer may be padded to different sizes.
    """
    if isinstance(drafter, DelegatingDrafter):
        check_vocab_size(drafter.drafter, info)
    elif isinstance(drafter, TrainedDrafter):
        size = drafter.model.config.target_record.vocab_size
        _check_between(info, size, size)
    elif isinstance(drafter, SmallLMDrafter):
        most = drafter.model.spec.vocab_size + _MOST_PADDING
        _check_between(info, drafter.vocab_size, most)


def _check_between(info: VerifierInfo, least: int, most: int) -> None:
    if not least <= info.vocab_size <= most:
        raise TargetMismatch(
            f"the vocabulary of the server's target {info.model} does not fit the drafter",
            expected=f"{least} token ids" if least == most else f"{least} to {most} token ids",
            got=info.vocab_size,
            remedy="use a drafter of this target, or check which target the server has",
        )


def _exported(
    folder: Path,
    info: VerifierInfo,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    **_: Any,
) -> TrainedDrafter:
    """Return the drafter of an exported folder, on its device and in the dtype of its target."""
    model = JakiroDrafter.from_pretrained(folder)
    record = model.config.target_record
    for what, expected, got in (
        ("target", record.fingerprint, info.target),
        ("tokenizer", record.tokenizer_fingerprint, info.tokenizer),
        ("vocabulary", record.vocab_size, info.vocab_size),
    ):
        if expected not in (None, got):
            raise TargetMismatch(
                f"the drafter in {folder} was made for a target other than the server's ({what})",
                expected=f"{record.name_or_path} ({str(expected)[:12]})",
                got=f"{info.model} ({str(got)[:12]})",
                remedy="connect to a server of this target, or export a drafter of its target",
            )
    found = None if dtype is None else torch_dtype(dtype)
    own_dtype = found if isinstance(found, torch.dtype) else None
    target = read_device_target(folder, model.draft_ids, device or "cpu", own_dtype)
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
    own = drafter.vocab_size
    drafter.vocab_size = min(own, vocabulary_size(tokenizer))
    check_vocab_size(drafter, info)
    drafter.vocab_size = min(own, info.vocab_size)
    return drafter
