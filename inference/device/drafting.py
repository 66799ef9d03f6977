"""Draft trees of one text on the machine of the drafter, from its tokens and rows of memory."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import UInt8
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from inference.draft_tree import DraftTree, SequenceTree
from inference.drafters.base import TokenSession
from inference.drafters.delegating import DelegatingSession
from inference.drafters.small_lm import SmallLMDrafter
from inference.drafters.trained.drafter import TrainedDrafter
from inference.protocol import (
    AdaptiveSession,
    Budget,
    Committed,
    Drafter,
    DraftSession,
    EncodedMemory,
)
from inference.remote.memory_rows import RowFormat
from inference.remote.messages import OpenSession, SessionOpened
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import StepRandom
from jakiro.errors import ConfigError, ResourceError

_CHUNK = 512  # number of tokens that a drafter reads at once


class DeviceDrafting:
    """The drafter's side of one text.

    Args:
        rows: form of the rows of memory that the drafter reads; None if it reads tokens alone.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        request: OpenSession,
        opened: SessionOpened,
        rows: RowFormat | None = None,
    ) -> None:
        self.sampling = sampling_of(request, opened.samples)
        self.limits = limits = opened.limits
        self.device = torch.device("cpu")
        self._format = rows
        # rows of the tokens that the drafter does not know yet
        self._rows = np.empty((0, 0 if rows is None else rows.num_bytes), np.uint8)
        self._known = 0  # number of tokens before the root that the drafter knows
        self.session: DraftSession | None = None  # None if nothing is drafted
        if drafter is None:
            return
        if isinstance(drafter, SmallLMDrafter | TrainedDrafter):
            self.device, self._dtype = drafter.model.device, drafter.model.dtype
        nodes, depth = drafter.max_nodes, drafter.max_depth
        self._version = drafter.version
        self._budget = Budget(min(nodes, limits.max_nodes), min(depth, limits.max_depth))
        capacity = len(opened.prompt_token_ids) + request.max_tokens + 1 + nodes
        self.session = drafter.new_session(self.sampling, capacity)
        _check_learns_from_tokens(self.session, drafter)

    def add_rows(self, rows: UInt8[np.ndarray, "tokens bytes"]) -> None:
        """Add the memory of verified tokens, in their order."""
        if rows.shape[1] != self._rows.shape[1]:
            raise ResourceError(
                "the server has other memory than when this machine connected to it",
                expected=f"{self._rows.shape[1]} bytes for each token",
                got=rows.shape[1],
                remedy="connect again",
            )
        self._rows = np.concatenate([self._rows, rows])

    @property
    def num_readable(self) -> int:
        """The number of tokens whose memory is here; only meaningful if the drafter reads rows."""
        return self._known + len(self._rows)

    @torch.inference_mode()
    def tree(self, token_ids: Sequence[int], step: int) -> SequenceTree:
        """Return the tree of a decoding step.

        Args:
            token_ids: prompt and text, which begin with those of earlier calls; the last token is
                the root.
            step: number of the step, which determines the random numbers.
        """
        base_length = torch.tensor([len(token_ids) - 1], device=self.device)
        if self.session is None:
            return DraftTree.empty(base_length, step).sequence_tree()
        self.advance(token_ids)
        random = StepRandom([self.sampling.stream_key(step)], self.device)
        return self.session.propose(self._budget, random).sequence_tree()

    @torch.inference_mode()
    def advance(self, token_ids: Sequence[int]) -> None:
        """Let the drafter read all tokens."""
        if self.session is None:
            return
        base_length = len(token_ids) - 1
        assert self._format is None or self.num_readable == base_length, "memory ends at the root"
        for end in [*range(self._known + _CHUNK, base_length, _CHUNK), base_length]:
            self.session.advance(self._committed(token_ids, end))
            self._known = end

    def rollback(self, length: int) -> None:
        """Let the drafter forget all tokens from position `length` on."""
        if self.session is not None and self._known > length:
            self.session.rollback(length)
            self._known = length

    def close(self, token_ids: Sequence[int]) -> None:
        """Free the memory; a drafter that learns reads the rest of the text."""
        if self.session is None:
            return
        if isinstance(self.session, AdaptiveSession) and len(token_ids) > self._known:
            self.session.on_finished(0, token_ids)
        self.session.close()
        self.session = None

    def _committed(self, token_ids: Sequence[int], end: int) -> Committed:
        """Return the tokens from the last known one to the root at position `end`."""
        tokens = torch.tensor([token_ids[self._known : end + 1]], device=self.device)
        count = end - self._known
        return Committed(
            base_length=(end,),
            num_verified=(count,),
            token_ids=tokens[:, :-1],
            root=tokens[:, -1:],
            memory=self._taken_memory(count),
            start=torch.tensor([self._known], device=self.device),
            end=torch.tensor([end], device=self.device),
            is_padded=False,
        )

    def _taken_memory(self, count: int) -> EncodedMemory | None:
        """Return the memory of the next tokens, and forget their rows; None if there is none."""
        if self._format is None or count == 0:
            return None
        rows, self._rows = self._rows[:count], self._rows[count:]
        memory = [part.to(self.device, self._dtype) for part in self._format.decoded(rows)]
        return EncodedMemory(tuple(memory), self._version)


def sampling_of(request: OpenSession, samples: bool) -> Sampling:
    """Return the options by which drafts are processed, which the server need not share."""
    processors = LogitsProcessorList()
    if samples:
        if request.temperature is not None:
            processors.append(TemperatureLogitsWarper(float(request.temperature)))
        if request.top_k is not None:
            processors.append(TopKLogitsWarper(request.top_k))
        if request.top_p is not None and request.top_p < 1:
            processors.append(TopPLogitsWarper(float(request.top_p)))
        if request.min_p is not None:
            processors.append(MinPLogitsWarper(float(request.min_p)))
    return Sampling(processors, samples, request.seed, quantizes_drafts=True)


def _check_learns_from_tokens(session: object, drafter: Drafter) -> None:
    while isinstance(session, DelegatingSession):
        session = session.session
    if isinstance(session, AdaptiveSession) and not isinstance(session, TokenSession):
        raise ConfigError(
            f"{drafter!r} learns from the target's distributions, which stay on the server",
            remedy="use lookup, aded or lm=MODEL",
        )
