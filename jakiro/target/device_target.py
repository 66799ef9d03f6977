"""A target without its layers: the embedding and the head's rows, for a device that drafts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from jakiro.errors import CheckpointError, TargetNotSupported
from jakiro.target.adapter import TargetAdapter
from jakiro.target.ends import SCALES, TargetEnds
from jakiro.target.int8_rows import Int8Rows, quantized_rows, restored_rows
from jakiro.utils.files import write_atomically

DESCRIPTION_FILE, WEIGHTS_FILE = "device.json", "target.safetensors"
EmbeddingForm = Literal["own", "int8"]

_CHUNK = 4096  # number of tokens that are embedded at a time


class DeviceDescription(BaseModel):
    """The description of the target's part in an exported folder.

    Attributes:
        has_head: whether the head's rows are there; otherwise the drafter has its own head, or the
            head is the embedding.
        drafts_all: whether the head has rows for all tokens.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    version: Literal[1] = 1
    hidden_size: int
    embedding: EmbeddingForm
    scales: dict[str, float]
    has_head: bool
    drafts_all: bool


class DeviceTarget(TargetEnds):
    """The embedding and the head of a target whose layers are elsewhere.

    Args:
        tensors: `embedding` [vocab, hidden], or `values` and `scales` of an int8 embedding; `head`
            [rows, hidden] and `head_bias` [rows], if they are there.
        draft_ids: ids of the tokens that may be drafted; None for all tokens.
    """

    def __init__(
        self,
        description: DeviceDescription,
        tensors: dict[str, Tensor],
        draft_ids: Int[Tensor, " drafted"] | None,
    ) -> None:
        self.description = description
        self.config = SimpleNamespace(**description.scales)
        self._quantized: Int8Rows | None = None
        self._table: Tensor | None = None
        if description.embedding == "int8":
            self._quantized = Int8Rows(tensors["values"], tensors["scales"])
        else:
            self._table = tensors["embedding"]
        self._like = tensors["like"]
        rows = tensors.get("head", self._table)
        self.head = nn.Identity() if rows is None else _linear(rows, tensors.get("head_bias"))
        self.head_ids = None if description.drafts_all else draft_ids

    @property
    def device(self) -> torch.device:
        """The device of the embeddings."""
        return self._like.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of features and embeddings."""
        return self._like.dtype

    def embed(self, token_ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch hidden"]:
        """Return the target's token embeddings, which may have been quantized."""
        if self._quantized is None:
            assert self._table is not None
            return self._table[token_ids]
        flat = token_ids.flatten()
        rows = Int8Rows(*(part[flat] for part in self._quantized))
        found = restored_rows(rows, self.description.hidden_size).to(self.dtype)
        return found.unflatten(0, token_ids.shape)


def write_device_target(
    target: TargetAdapter,
    draft_ids: Int[Tensor, " drafted"] | None,
    folder: Path,
    *,
    embedding: EmbeddingForm = "int8",
    has_head: bool = True,
) -> None:
    """Write a target's embedding and head to a folder.

    Args:
        embedding: format of the embedding. int8 may change drafts, but never the output's
            distribution.
    """
    table = _embedding_of(target)
    tensors: dict[str, Tensor] = {"like": table.new_zeros(1), "embedding": table}
    if has_head:
        tensors |= _head_of(target, draft_ids)
        is_tied = "head_bias" not in tensors and torch.equal(tensors["head"], table)
        if is_tied and embedding == "own":
            del tensors["head"]
    if embedding == "int8":
        own = quantized_rows(tensors.pop("embedding"))
        tensors |= {"values": own.values, "scales": own.scales}
    scales = {name: getattr(target.config, name, None) for name in SCALES}
    description = DeviceDescription(
        hidden_size=target.spec.hidden_size,
        embedding=embedding,
        scales={name: float(own) for name, own in scales.items() if own is not None},
        has_head="head" in tensors,
        drafts_all=draft_ids is None,
    )
    save_file(
        {name: own.cpu().contiguous() for name, own in tensors.items()}, folder / WEIGHTS_FILE
    )
    write_atomically(folder / DESCRIPTION_FILE, description.model_dump_json(indent=2) + "\n")


def read_device_target(
    folder: Path,
    draft_ids: Int[Tensor, " drafted"] | None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> DeviceTarget:
    """Return the target's part of an exported folder."""
    try:
        text = (folder / DESCRIPTION_FILE).read_text(encoding="utf-8")
        description = DeviceDescription.model_validate_json(text)
        tensors = load_file(folder / WEIGHTS_FILE, device=str(device))
        fixed = {"scales"}
        own = {
            name: value.to(dtype) if value.is_floating_point() and name not in fixed else value
            for name, value in tensors.items()
        }
        return DeviceTarget(description, own if dtype is not None else tensors, draft_ids)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(
            f"the target's part of {folder} cannot be read",
            expected=f"{DESCRIPTION_FILE} and {WEIGHTS_FILE} of jakiro export --to device",
            got=str(error)[:200],
            remedy="export the drafter again",
        ) from error


def _embedding_of(target: TargetAdapter) -> Float[Tensor, "vocab hidden"]:
    """Return the embedding of every token, with the scale of the model's family."""
    ids = torch.arange(target.spec.vocab_size, device=target.device)
    with torch.no_grad():
        return torch.cat([target.embed(chunk) for chunk in ids.split(_CHUNK)])


def _head_of(target: TargetAdapter, draft_ids: Tensor | None) -> dict[str, Tensor]:
    head = target.head
    if type(head) is not nn.Linear:
        raise TargetNotSupported(
            "the head of this target cannot be written for a device",
            expected="a plain linear layer",
            got=type(head).__name__,
            remedy="load the target without quantization or adapters",
        )
    named: dict[str, Any] = {"head": head.weight, "head_bias": head.bias}
    rows = {name: own.detach() for name, own in named.items() if own is not None}
    if draft_ids is None:
        return rows
    return {name: own[draft_ids.to(own.device)] for name, own in rows.items()}


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer
