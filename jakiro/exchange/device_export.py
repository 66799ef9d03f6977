"""Export of a drafter for a device that does not have the target: `jakiro export --to device`."""

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError, TargetNotSupported
from jakiro.target.adapter import TargetAdapter
from jakiro.target.ends import (
    DESCRIPTION_FILE,
    SCALES,
    WEIGHTS_FILE,
    DeviceDescription,
    EmbeddingForm,
)
from jakiro.target.int8 import quantized_rows
from jakiro.target.record import check_target, check_tokenizer
from jakiro.utils.files import write_atomically, written_folder

_CHUNK = 4096  # number of tokens that are embedded at a time


def export_device(
    drafter: JakiroDrafter,
    target: TargetAdapter,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    embedding: EmbeddingForm = "int8",
) -> None:
    """Write all that a device needs to draft: the folder appears in full or not at all.

    Args:
        embedding: format of the target's embedding. int8 may change drafts, but never the output's
            distribution.
    """
    settings = drafter.config.settings
    if settings.tail_layers:
        raise ConfigError(
            "this drafter computes with the target's last layers, which a device does not have",
            expected="a drafter without tail_layers",
            got=f"tail_layers: {settings.tail_layers}",
            remedy="let the server draft with jakiro serve --drafter, or train another drafter",
        )
    check_target(drafter.config.target_record, target.spec)
    check_tokenizer(drafter.config.target_record, tokenizer)
    with written_folder(folder) as partial:
        drafter.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        _write_ends(target, drafter, partial, embedding)


def _write_ends(
    target: TargetAdapter, drafter: JakiroDrafter, folder: Path, embedding: EmbeddingForm
) -> None:
    """Write a target's embedding and, unless the drafter has its own, the rows of its head."""
    table = _embedding_of(target)
    tensors: dict[str, Tensor] = {"like": table.new_zeros(1)}
    if drafter.own_head is None:
        tensors |= _head_of(target, drafter.draft_ids)
        is_tied = "head_bias" not in tensors and torch.equal(tensors["head"], table)
        if is_tied and embedding == "own":
            del tensors["head"]
    if embedding == "int8":
        tensors |= quantized_rows(table)._asdict()
    else:
        tensors["embedding"] = table
    scales = {name: getattr(target.config, name, None) for name in SCALES}
    description = DeviceDescription(
        hidden_size=target.spec.hidden_size,
        embedding=embedding,
        scales={name: float(scale) for name, scale in scales.items() if scale is not None},
        has_head="head" in tensors,
        drafts_all=drafter.draft_ids is None,
    )
    on_cpu = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(on_cpu, folder / WEIGHTS_FILE)
    write_atomically(folder / DESCRIPTION_FILE, description.model_dump_json(indent=2) + "\n")


def _embedding_of(target: TargetAdapter) -> Float[Tensor, "vocab hidden"]:
    """Return the embedding of every token, with the scale of the model's family."""
    ids = torch.arange(target.spec.vocab_size, device=target.device)
    with torch.no_grad():
        return torch.cat([target.embed(chunk) for chunk in ids.split(_CHUNK)])


def _head_of(target: TargetAdapter, draft_ids: Int[Tensor, " drafted"] | None) -> dict[str, Tensor]:
    """Return the weight and the bias of the head, for the tokens that may be drafted."""
    head = target.head
    if type(head) is not nn.Linear:
        raise TargetNotSupported(
            "the head of this target cannot be written for a device",
            expected="a plain linear layer",
            got=type(head).__name__,
            remedy="load the target without quantization or adapters",
        )
    named: dict[str, Any] = {"head": head.weight, "head_bias": head.bias}
    rows = {name: part.detach() for name, part in named.items() if part is not None}
    if draft_ids is None:
        return rows
    return {name: part[draft_ids.to(part.device)] for name, part in rows.items()}
