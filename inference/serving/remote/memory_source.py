"""The memory of a session as rows, encoded from the target's cache when it is needed."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import UInt8

from inference.drafters.trained.drafter import TrainedDrafter
from inference.drafters.trained.memory import (
    encoder_fingerprint,
    memory_drafter,
    row_dtype,
    row_format,
)
from inference.protocol import Drafter
from inference.remote.messages import MemoryOffer, MemoryRequest, MessageError
from jakiro.target.cache import SlotCache
from jakiro.target.step import StepOutput, chain_step

MAX_NEWEST_ROWS = 64  # largest number of rows with a verdict


class MemorySource:
    """Encodes the memory that a device asks for."""

    def __init__(self, drafter: TrainedDrafter, request: MemoryRequest) -> None:
        self._drafter = drafter
        self.hidden_states = drafter.hidden_states
        self._format = row_format(drafter.model, row_dtype(drafter.model), request.encoding)

    def rows(
        self, cache: SlotCache, token_ids: Sequence[int], begin: int, end: int
    ) -> UInt8[np.ndarray, "tokens bytes"]:
        """Return the rows of cached tokens.

        Args:
            cache: the target's cache of one sequence, which may be closed if `begin == end`.
        """
        if begin == end:
            return np.empty((0, self._format.num_bytes), np.uint8)
        target = self._drafter.target
        step = chain_step(torch.tensor([list(token_ids[begin:end])], device=target.device), begin)
        nothing = torch.empty(*step.slots.shape, 0, device=target.device)  # no features
        return self._format.encoded(
            self._drafter.encode_memory(StepOutput(nothing, step, cache)).tensors
        )


def memory_offer(drafter: Drafter | None) -> MemoryOffer | None:
    """Return the memory that a server can encode; None if its drafter has none for a device."""
    encoding = memory_drafter(drafter)
    if encoding is None:
        return None
    encoder, dtype = encoder_fingerprint(encoding.model), row_dtype(encoding.model)
    return MemoryOffer(encoder=encoder, dtype=dtype)


def memory_source(
    drafter: Drafter | None, offer: MemoryOffer | None, request: MemoryRequest | None
) -> MemorySource | None:
    """Return the source of a session's memory; None if the device reads none."""
    if request is None:
        return None
    encoding = memory_drafter(drafter)
    if encoding is None or offer is None or request.encoder != offer.encoder:
        raise MessageError(
            "other_encoder",
            "the drafter of this machine is another one than the server's, which cannot encode the "
            "memory for it",
            expected="no trained drafter" if offer is None else f"the encoder {offer.encoder}",
            got=f"the encoder {request.encoder}",
            remedy="export the drafter that the server was started with",
        )
    return MemorySource(encoding, request)
