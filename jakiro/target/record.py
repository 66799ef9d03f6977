"""Record of a target, stored in the target's drafters, and checks of a target against a record."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import nn
from transformers import PreTrainedTokenizerBase

from jakiro.errors import TargetMismatch
from jakiro.target.adapter import TargetSpec
from jakiro.target.attention_shape import AttentionShape, KeyRotation
from jakiro.utils.files import fingerprint
from jakiro.utils.logs import get_logger
from jakiro.utils.settings import Settings

_logger = get_logger(__name__)
_ALLOW = (
    "; or allow other weights: with other_weights=True in Python, or with --other-weights, an "
    "option of generate, chat, serve, bench and verify"
)


class TargetRecord(Settings):
    """Properties of the target (see `TargetSpec`) and the tokenizer that a drafter was made for."""

    name_or_path: str
    hidden_size: int
    vocab_size: int
    kv_widths: tuple[int, ...] = Field(min_length=1)
    fingerprint: str
    num_hidden_states: int | None
    attention: AttentionShape
    tokenizer_fingerprint: str | None = None
    template_fingerprint: str | None = None
    gguf_sha256: str | None = None
    key_rotation: KeyRotation | None = None


def record_target(
    spec: TargetSpec, name_or_path: str, tokenizer: PreTrainedTokenizerBase | None = None
) -> TargetRecord:
    """Return the record of a target, to be stored in its drafters.

    A relative path is recorded as an absolute one, so that the drafter finds its target from every
    working directory.
    """
    path = Path(name_or_path)
    return TargetRecord(
        # An empty name is no path, although Path("") is the working directory.
        name_or_path=str(path.absolute()) if name_or_path and path.exists() else name_or_path,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        kv_widths=spec.kv_widths,
        fingerprint=spec.fingerprint,
        num_hidden_states=spec.num_hidden_states,
        attention=spec.attention,
        tokenizer_fingerprint=None if tokenizer is None else tokenizer_fingerprint(tokenizer),
        template_fingerprint=None if tokenizer is None else template_fingerprint(tokenizer),
        gguf_sha256=spec.gguf_sha256,
        key_rotation=spec.key_rotation,
    )


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of the vocabulary: all token strings and their ids."""
    return fingerprint(sorted(tokenizer.get_vocab().items()))


def template_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return a hash of the chat template, or None if the tokenizer has no chat template."""
    template = getattr(tokenizer, "chat_template", None)
    return None if template is None else fingerprint(template)


def hash_weights(model: nn.Module) -> str:
    """Return a hash of the names, dtypes, shapes and bytes of all weights, including adapters.

    Unlike the fingerprint in a record, this hash depends on the dtype and on every weight.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name}:{weight.dtype}:{tuple(weight.shape)}:".encode())
        digest.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def check_target(
    record: TargetRecord, spec: TargetSpec, *, other_weights: bool | None = None
) -> None:
    """Raise an error if the loaded target differs from the record.

    Args:
        other_weights: whether to warn, instead of raising an error, if only the weights differ;
            None if they must not differ, so that the error names no option for this.
    """
    for name, expected, got in (
        ("hidden size", record.hidden_size, spec.hidden_size),
        ("vocabulary size", record.vocab_size, spec.vocab_size),
        ("number of layers", len(record.kv_widths), spec.num_layers),
        ("key/value widths", record.kv_widths, spec.kv_widths),
        ("fingerprint", record.fingerprint[:12], spec.fingerprint[:12]),
    ):
        if expected == got:
            continue
        if name == "fingerprint" and other_weights:
            _logger.warning(
                "the drafter was made for other weights than those of the target; drafts may be "
                "accepted less often"
            )
        else:
            raise TargetMismatch(
                f"the drafter was made for a target other than the one loaded ({name} differs)",
                expected=f"{expected}, as in {record.name_or_path}",
                got=got,
                remedy="load the target named in the drafter's config, or train a new drafter"
                + (_ALLOW if name == "fingerprint" and other_weights is not None else ""),
            )


def check_tokenizer(record: TargetRecord, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise an error if the vocabulary differs; warn if the chat template differs."""
    got: Any = tokenizer_fingerprint(tokenizer)
    if record.tokenizer_fingerprint not in (None, got):
        raise TargetMismatch(
            "the drafter was trained with a tokenizer other than the one loaded",
            expected=f"the tokenizer of {record.name_or_path}",
            got=f"{len(tokenizer)} tokens with a different vocabulary hash",
            remedy="load the tokenizer from the target's own folder",
        )
    if record.template_fingerprint not in (None, template_fingerprint(tokenizer)):
        _logger.warning("the drafter was trained with a chat template other than the tokenizer's")
