"""The two ends of a target that trained drafters compute with: its embedding and its head.

A device that drafts for a server has a `DeviceTarget`, which consists of the ends alone.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from jakiro.errors import CheckpointError
from jakiro.target.int8 import Int8Rows, restored_rows

SCALES = ("logits_scaling", "logit_scale", "final_logit_softcapping")  # names in configs
DESCRIPTION_FILE, WEIGHTS_FILE = "device.json", "target.safetensors"
EmbeddingForm = Literal["own", "int8"]


class TargetEnds(ABC):
    """A target's embedding and head, with or without the layers between them.

    Attributes:
        head_ids: ids of the tokens that the head has rows for; None for all tokens.
        like: a tensor with the dtype and the device of embeddings and features.
    """

    config: Any
    head: nn.Module
    head_ids: Int[Tensor, " drafted"] | None = None
    like: Tensor

    @property
    def device(self) -> torch.device:
        return self.like.device

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    @property
    def head_is_packed(self) -> bool:
        """Whether the head computes with reordered weights."""
        return False

    @abstractmethod
    def embed(self, token_ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch hidden"]:
        """Return the target's own token embeddings."""

    def logits(self, features: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch rows"]:
        """Return the logits of the head's rows, including the scaling of the model's family."""
        return self.adjusted(self.head(features))

    def adjusted(self, logits: Float[Tensor, "*batch tokens"]) -> Float[Tensor, "*batch tokens"]:
        """Return the head's raw logits after the model family's scaling and soft-capping."""
        if (divisor := getattr(self.config, "logits_scaling", None)) is not None:
            logits = logits / divisor
        if (factor := getattr(self.config, "logit_scale", None)) is not None:
            logits = logits * factor
        if (cap := getattr(self.config, "final_logit_softcapping", None)) is not None:
            logits = cap * torch.tanh(logits / cap)
        return logits


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
            [rows, hidden] and `head_bias` [rows], if they are there; `like`.
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
        self.like = tensors["like"]
        self._table: Tensor | Int8Rows
        if description.embedding == "int8":
            self._table = Int8Rows(tensors["values"], tensors["scales"])
        else:
            self._table = tensors["embedding"]
        rows = tensors.get("head", tensors.get("embedding"))
        self.head = nn.Identity() if rows is None else _linear(rows, tensors.get("head_bias"))
        self.head_ids = None if description.drafts_all else draft_ids

    def embed(self, token_ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch hidden"]:
        if isinstance(self._table, Tensor):
            return self._table[token_ids]
        rows = Int8Rows(*(part[token_ids.flatten()] for part in self._table))
        embeddings = restored_rows(rows, self.description.hidden_size).to(self.dtype)
        return embeddings.unflatten(0, token_ids.shape)


def read_device_target(
    folder: Path,
    draft_ids: Int[Tensor, " drafted"] | None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> DeviceTarget:
    """Return the target's part of an exported folder, in its own dtype unless one is given."""
    try:
        text = (folder / DESCRIPTION_FILE).read_text(encoding="utf-8")
        description = DeviceDescription.model_validate_json(text)
        tensors = load_file(folder / WEIGHTS_FILE, device=str(device))
        for name, tensor in tensors.items():
            if dtype is not None and tensor.is_floating_point() and name != "scales":
                tensors[name] = tensor.to(dtype)
        return DeviceTarget(description, tensors, draft_ids)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(
            f"the target's part of {folder} cannot be read",
            expected=f"{DESCRIPTION_FILE} and {WEIGHTS_FILE} of jakiro export --to device",
            got=str(error)[:200],
            remedy="export the drafter again",
        ) from error


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer
