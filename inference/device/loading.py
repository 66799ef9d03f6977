"""Drafters by their names, for a target that is on a server."""

from typing import Any

from inference.drafters.aded.drafter import AdedDrafter
from inference.drafters.aded.index import check_vocabulary
from inference.drafters.lookup import LookupDrafter
from inference.drafters.names import ADED, LM, LOOKUP, UntrainedName
from inference.drafters.small_lm import SmallLMDrafter
from inference.protocol import Drafter
from inference.remote.messages import VerifierInfo
from jakiro.errors import ConfigError, TargetMismatch
from jakiro.target.record import tokenizer_fingerprint
from jakiro.utils.pretrained import load_causal_lm, load_tokenizer

NONE = "none"
DEVICE_DRAFTERS = f"{LOOKUP}, {ADED}, {LM}=MODEL, or {NONE}"


def device_drafter(name: str, info: VerifierInfo, **load: Any) -> Drafter | None:
    """Return a drafter that reads tokens alone; None for the name `none`.

    Args:
        name: `lookup`, `aded`, `lm=MODEL` (a small model with the target's tokenizer), or `none`.
        info: target of the server.
        **load: arguments of `load_causal_lm` for the small model.

    Raises:
        ConfigError: there is no such drafter, or it needs what is on the server.
        CheckpointError: the small model cannot be loaded.
        TargetMismatch: the small model has another tokenizer than the target.
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
    raise ConfigError(
        f"the drafter {name} cannot draft on this machine for a target on a server",
        expected=DEVICE_DRAFTERS,
        got=name,
        remedy="use one of these, or let the server draft with jakiro serve --drafter",
    )


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
