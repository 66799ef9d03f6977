"""What to decode, and how far it has come."""

from dataclasses import dataclass, field

from inference.sampling import Sampling
from inference.stats import DecodeStats
from inference.stopping import StopRule
from inference.turns import Turn


@dataclass(frozen=True)
class Request:
    """One sequence to continue, and when to stop."""

    token_ids: list[int]  # the prompt, without padding
    sampling: Sampling
    stop: StopRule
    max_length: int  # prompt included
    turn: Turn | None = None  # where it teaches something


@dataclass
class Progress:
    """One request being decoded."""

    index: int  # among the requests of the run
    request: Request
    token_ids: list[int]  # prompt and what was emitted; the last one is the root
    stats: DecodeStats = field(default_factory=DecodeStats)

    @classmethod
    def of(cls, index: int, request: Request) -> "Progress":
        """Return the state before the first token."""
        return cls(index, request, list(request.token_ids))

    @property
    def new_token_ids(self) -> list[int]:
        """What was emitted so far."""
        return self.token_ids[len(self.request.token_ids) :]
