"""Requests, their stop rules, and the state of their sequences."""

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
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import StreamKey
from jakiro.errors import JakiroError, RequestError

# Subclasses of these criteria are excluded, because they may behave differently.
HOST_CRITERIA = (MaxLengthCriteria, EosTokenCriteria, MaxTimeCriteria)


class StopRule:
    """Decides after each token whether a sequence is complete.

    Limits of length and time, and end-of-sequence tokens, are checked on the host, without calling
    the criteria. Any other criterion is called with the tokens so far.
    """

    def __init__(self, criteria: StoppingCriteriaList, device: torch.device) -> None:
        self.device = device
        self.max_length = min(
            (rule.max_length for rule in criteria if type(rule) is MaxLengthCriteria), default=None
        )
        self.eos_ids = {
            int(token)
            for rule in criteria
            if type(rule) is EosTokenCriteria
            for token in rule.eos_token_id.flatten().tolist()
        }
        timers = [rule for rule in criteria if type(rule) is MaxTimeCriteria]
        self.deadline = min(
            (timer.initial_timestamp + timer.max_time for timer in timers), default=None
        )
        self.others = StoppingCriteriaList(
            rule for rule in criteria if type(rule) not in HOST_CRITERIA
        )

    def __call__(self, token_ids: list[int]) -> bool:
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
class OutputOptions:
    log_probs: bool = False  # log-probabilities under the target's processed distribution
    scores: bool = False  # processed logits
    logits: bool = False  # raw logits
    raw_log_probs: bool = False  # log-probabilities under the target's raw distribution
    num_likeliest: int = 0  # number of likeliest tokens of the raw distribution
    trees: bool = False  # draft trees after their verification


@dataclass(frozen=True)
class Request:
    token_ids: list[int]  # the prompt, without padding
    sampling: Sampling
    stop: StopRule
    max_length: int  # largest number of tokens, including the prompt
    tickets: tuple[RequestTicket, ...] = ()  # empty if nothing is learned from the request
    record: OutputOptions | None = None  # details to return; None for those of the run
    drafts: bool = True  # whether to draft; False for autoregressive decoding


@dataclass
class SequenceState:
    index: int  # index of the request in the run
    request: Request
    token_ids: list[int]  # prompt and emitted tokens; the last one is the root
    stats: DecodeStats = field(default_factory=DecodeStats)
    # number of decoding steps so far, on which the random numbers of the next step depend
    num_steps: int = 0
    is_finished: bool = False
    error: JakiroError | None = None  # why the sequence failed; None if it did not

    @classmethod
    def of(cls, index: int, request: Request) -> "SequenceState":
        return cls(index, request, list(request.token_ids))

    def is_complete(self) -> bool:
        try:
            return self.request.stop(self.token_ids)
        except Exception as error:
            raise RequestError.caused_by("a stopping criterion", error) from error

    @property
    def new_token_ids(self) -> list[int]:
        return self.token_ids[len(self.request.token_ids) :]

    @property
    def stream_key(self) -> StreamKey:
        return self.request.sampling.stream_key(self.num_steps)
