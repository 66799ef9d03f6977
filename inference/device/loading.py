"""Drafters by their names, for a target that is on a server."""

from pathlib import Path
from typing import Any

import torch

from inference.drafters.aded.drafter import AdedDrafter
from inference.drafters.aded.index import check_vocabulary
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
DEVICE_DRAFTERS = f"{LOOKUP}, {ADED}, {LM}=MODEL, {NONE}, or a folder of jakiro export-device"


def device_drafter(name: str, info: VerifierInfo, **load: Any) -> Drafter | None:
    """Return a drafter that needs no target on this machine; None for the name `none`.

    Args:
        name: `lookup`, `aded`, `lm=MODEL` (a small model with the target's tokenizer), `none`, or a
            folder that `jakiro export-device` has written.
        info: target of the server.
        **load: arguments of `load_causal_lm` for the small model; `dtype` and `device` also apply
            to an exported drafter.

    Raises:
        ConfigError: there is no such drafter, or it cannot draft without the target.
        CheckpointError: the small model or the exported drafter cannot be loaded.
        TargetMismatch: the small model has another tokenizer than the target, or the exported
            drafter was made for another target.
        TargetNotSupported: the small model cannot process a tree.
    """
    parsed = UntrainedName.parse(name)
    if name == LOOKUP:
        return LookupDrafter()
    if name == ADED:
        check_vocabulary(info.vocab_size)
        return AdedDrafter()
    if parsed is not None and parsed.kind == LM:
        return _small_lm(str(parsed.path), info, load)
    if name == NONE:
        return None
    folder = Path(name.removeprefix("drafter="))
    if (folder / DESCRIPTION_FILE).is_file():
        return _exported(folder, info, **load)
    if (folder / "config.json").is_file() or packaged_drafter(name) is not None:
        raise ConfigError(
            f"the drafter {name} was not exported for a machine without its target",
            expected=f"a folder of jakiro export-device, with {DESCRIPTION_FILE}",
            got="a drafter or a model without this file",
            remedy=f"run jakiro export-device {name} --out FOLDER where the target is",
        )
    raise ConfigError(
        f"the drafter {name} cannot draft on this machine for a target on a server",
        expected=DEVICE_DRAFTERS,
        got=name,
        remedy="use one of these, or let the server draft with jakiro serve --drafter",
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
    drafter.vocab_size = min(drafter.vocab_size, info.vocab_size)
    return drafter
