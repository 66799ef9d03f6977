"""The two ends of a target that trained drafters compute with: its embedding and its head."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

SCALES = ("logits_scaling", "logit_scale", "final_logit_softcapping")  # names in configs


class TargetEnds(ABC):
    """A target's embedding and head, with or without the layers between them.

    Attributes:
        head_ids: ids of the tokens that the head has rows for; None for all tokens.
    """

    config: Any
    head: nn.Module
    head_ids: Int[Tensor, " drafted"] | None = None

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of the embeddings."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of features and embeddings."""

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
