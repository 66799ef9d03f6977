"""The tokens that a decoding step emits for one sequence."""

import time
from dataclasses import dataclass, field

from inference.engine.details import TokenDetails
from jakiro.errors import JakiroError

BONUS = 0  # depth of a bonus or recovered token, which comes from the target itself
TARGET = -1  # proposer of such a token


@dataclass(frozen=True)
class DecodeStep:
    """The tokens that one decoding step emitted for one sequence."""

    token_ids: list[int]
    depths: list[int]  # depth of each token in the draft tree, or BONUS
    finished: bool
    index: int = 0  # index of the request in the run
    details: TokenDetails | None = None  # None if no details were requested
    autoregressive_seconds: float = 0.0  # estimate for these tokens without drafts; 0 if unknown
    # expert or drafter that proposed each token, or TARGET
    proposer_ids: list[int] = field(default_factory=list)
    error: JakiroError | None = None  # why the sequence ended too early; None if it did not
    # time at which the tokens were emitted, by `time.monotonic()`
    emitted_at: float = field(default_factory=time.monotonic, compare=False)
