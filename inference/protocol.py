"""What the engine asks of anything that drafts, and what it tells it in return."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from inference.draft_tree import DraftTree
from inference.sampling import Sampling
from jakiro.target import StepOutput
from moa.rows import Rows


class MemoryRows(NamedTuple):
    """Cross-attention rows of consecutive verified tokens."""

    base_length: int  # position of the first of them
    tensors: Rows
    encoder_version: str


class Committed(NamedTuple):
    """Tokens that have become final: n verified ones, whose rows are in the cache, then the root.

    The root stands at `base_length`, the verified tokens just before it.
    """

    base_length: int
    token_ids: Int[Tensor, "batch n_and_root"]
    memory: MemoryRows | None  # of the n verified tokens; None for drafters that need none


@dataclass(frozen=True)
class VerifyResult:
    """What verification made of a tree; it teaches drafters that learn, and changes no state."""

    round_id: int
    base_length: int
    path: list[list[int]]  # accepted nodes of each sequence
    accepted_length: list[int]
    next_token: list[int]
    finished: list[bool]
    laws: Callable[[int, int], Float[Tensor, " vocab"]]  # (sequence, visited node) -> target's law


@runtime_checkable
class DraftSession(Protocol):
    """One request's drafting state.

    At every step: length of memory == number of cached tokens == position of the root.
    """

    def advance(self, committed: Committed) -> None:
        """Take in final tokens. Telling the same `base_length` again changes nothing."""
        ...

    def propose(self, budget: int, generator: torch.Generator | None) -> DraftTree:
        """Return a tree of at most `budget` candidates below the root."""
        ...

    def feedback(self, result: VerifyResult) -> None:
        """Learn from a verification, or ignore it."""
        ...

    def rollback(self, length: int) -> None:
        """Forget everything from position `length` on."""
        ...

    def close(self) -> None:
        """Free the session's memory."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """Weights or tables that sessions share; holds no request's state."""

    @property
    def needs(self) -> frozenset[str]:
        """What must come with `Committed`: {"memory"}, or nothing."""
        ...

    @property
    def version(self) -> str:
        """Identifies what encodes memory, so that rows of another encoder are refused."""
        ...

    @property
    def max_nodes(self) -> int:
        """The most nodes that a tree can have."""
        ...

    @property
    def max_depth(self) -> int:
        """The longest path that a tree can have."""
        ...

    def open(self, sampling: Sampling, capacity: int, batch: int = 1) -> DraftSession:
        """Return a session for sequences of up to `capacity` tokens."""
        ...

    def encode(self, output: StepOutput, rows: Int[Tensor, "batch rows"]) -> MemoryRows:
        """Return memory of the tokens at query indices `rows` of a target forward.

        Asked only of drafters that need memory.
        """
        ...
