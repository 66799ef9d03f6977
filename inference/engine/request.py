"""What to decode, and how far it has come."""

import time
from dataclasses import dataclass, field

import torch
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
)

from inference.engine.stats import DecodeStats
from inference.protocol import RequestTicket
from inference.sampling import Sampling

# Exactly these: what derives from them may decide otherwise.
HOST_CRITERIA = (MaxLengthCriteria, EosTokenCriteria, MaxTimeCriteria)


class StopRule:
    """Decides after each token, so decoding never overshoots.

    Length, end-of-sequence and time are read off the criteria and tested on the host; any other
    criterion is called with the tokens so far.

    Args:
        criteria: as prepared by `generate()`.
        device: where other criteria expect the tokens.
    """

    def __init__(self, criteria: StoppingCriteriaList, device: torch.device) -> None:
        self.device = device
        self.max_length = min(
            (one.max_length for one in criteria if type(one) is MaxLengthCriteria),
            default=None,
        )
        self.eos_ids = {
            int(token)
            for one in criteria
            if type(one) is EosTokenCriteria
            for token in one.eos_token_id.flatten().tolist()
        }
        self.deadline = min(
            (
                one.initial_timestamp + one.max_time
                for one in criteria
                if type(one) is MaxTimeCriteria
            ),
            default=None,
        )
        self.others = StoppingCriteriaList(
            one for one in criteria if type(one) not in HOST_CRITERIA
        )

    def __call__(self, token_ids: list[int]) -> bool:
        """Return whether the sequence, prompt included, is complete."""
        if token_ids[-1] in self.eos_ids:
            return True
        if self.max_length is not None and len(token_ids) >= self.max_length:
            return True
        if self.deadline is not None and time.time() > self.deadline:
            return True
        if not self.others:
            return False
        so_far = torch.tensor([token_ids], device=self.device)
        return bool(self.others(so_far, None).all())


@dataclass(frozen=True)
class Request:
    """One sequence to continue, and when to stop."""

    token_ids: list[int]  # the prompt, without padding
    sampling: Sampling
    stop: StopRule
    max_length: int  # prompt included
    ticket: RequestTicket | None = None  # where it teaches something


@dataclass
class SequenceState:
    """One request being decoded."""

    index: int  # among the requests of the run
    request: Request
    token_ids: list[int]  # prompt and what was emitted; the last one is the root
    stats: DecodeStats = field(default_factory=DecodeStats)

    @classmethod
    def of(cls, index: int, request: Request) -> "SequenceState":
        """Return the state before the first token."""
        return cls(index, request, list(request.token_ids))

    @property
    def new_token_ids(self) -> list[int]:
        """What was emitted so far."""
        return self.token_ids[len(self.request.token_ids) :]
