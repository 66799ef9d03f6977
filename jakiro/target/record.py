"""What a drafter remembers of its target, and the check that it meets the same one again."""

import hashlib
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from jakiro.errors import TargetMismatch
from jakiro.target.adapter import TargetSpec
from jakiro.target.attention_shape import AttentionShape
from jakiro.utils.files import fingerprint
from jakiro.utils.logs import get_logger
from jakiro.utils.settings import Settings

_logger = get_logger(__name__)


class TargetRecord(Settings):
    """Identity of the target and tokenizer that a drafter was made for."""

    name_or_path: str
    hidden_size: int
    vocab_size: int
    kv_widths: tuple[int, ...]
    fingerprint: str
    num_hidden_states: int | None  # None: what its layers pass on is not one vector per token
    attention: AttentionShape
    tokenizer_fingerprint: str | None = None
    template_fingerprint: str | None = None


def record_target(
    spec: TargetSpec, name_or_path: str, tokenizer: PreTrainedTokenizerBase | None = None
) -> TargetRecord:
    """Return the record of a target, to be stored in its drafters."""
    return TargetRecord(
        name_or_path=name_or_path,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        kv_widths=spec.kv_widths,
        fingerprint=spec.fingerprint,
        num_hidden_states=spec.num_hidden_states,
        attention=spec.attention,
        tokenizer_fingerprint=None if tokenizer is None else tokenizer_fingerprint(tokenizer),
        template_fingerprint=None if tokenizer is None else template_fingerprint(tokenizer),
    )


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash the vocabulary: the ids that every token string maps to."""
    return fingerprint(sorted(tokenizer.get_vocab().items()))


def template_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Hash the chat template, or return None where there is none."""
    template = getattr(tokenizer, "chat_template", None)
    return None if template is None else fingerprint(template)


def hash_weights(model: nn.Module) -> str:
    """Hash names, types, shapes and bytes of all weights, those of adapters included.

    The fingerprint in a record knows a target in every dtype; this knows what it computes.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name}:{weight.dtype}:{tuple(weight.shape)}:".encode())
        digest.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def check_target(record: TargetRecord, spec: TargetSpec) -> None:
    """Refuse a target that is not the one in the record.

    Raises:
        TargetMismatch: naming the first property that differs.
    """
    for name, expected, got in (
        ("hidden size", record.hidden_size, spec.hidden_size),
        ("vocabulary size", record.vocab_size, spec.vocab_size),
        ("number of layers", len(record.kv_widths), spec.num_layers),
        ("key/value widths", record.kv_widths, spec.kv_widths),
        ("fingerprint", record.fingerprint[:12], spec.fingerprint[:12]),
    ):
        if expected != got:
            raise TargetMismatch(
                f"the drafter was made for another target ({name} differs)",
                expected=f"{expected} of {record.name_or_path}",
                got=got,
                remedy="load the target in the drafter's config, or train a drafter for yours",
            )


def check_tokenizer(record: TargetRecord, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer whose ids differ from those of training; warn of another chat template.

    Raises:
        TargetMismatch: the vocabularies differ.
    """
    got: Any = tokenizer_fingerprint(tokenizer)
    if record.tokenizer_fingerprint not in (None, got):
        raise TargetMismatch(
            "the tokenizer is not the one that the drafter was trained with",
            expected=f"the tokenizer of {record.name_or_path}",
            got=f"{len(tokenizer)} tokens with another vocabulary hash",
            remedy="load the tokenizer from the target's own folder",
        )
    if record.template_fingerprint not in (None, template_fingerprint(tokenizer)):
        _logger.warning("the chat template is not the one that the drafter was trained with")
