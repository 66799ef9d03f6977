"""The drafter that needs no training: trigrams that adapt to what is written (arXiv 2407.12021)."""

import numpy as np
import torch
from jaxtyping import Float, Int64
from pydantic import Field
from torch import Tensor

from inference.drafters.aded.index import TrigramIndex, packed, trigrams_of
from inference.drafters.aded.search import SearchSettings, search
from inference.drafters.aded.table import TrigramTable
from inference.drafters.base import TokenSession, WithoutMemory
from inference.drafters.candidates import Candidates
from inference.protocol import Budget, RequestCounter
from inference.sampling import Sampling
from jakiro.utils.settings import Settings


class AdedSettings(Settings):
    """How trigrams are learnt, and how they are searched."""

    num_nodes: int = Field(24, ge=1)
    depth: int = Field(8, ge=1)
    search: SearchSettings = SearchSettings()
    # That are learnt; 112 bytes each with 12 successors.
    max_bigrams: int = Field(2**17, ge=1, le=2**32)
    successors: int = Field(12, ge=1, le=256)  # of each bigram
    # What a trigram gains whenever it is met; the paper: 0.04.
    step: float = Field(0.1, ge=0, le=1e6)
    max_weight: float = Field(3.0, gt=0, le=1e6)
    window: int = Field(16, ge=3)  # of the last tokens, whose trigrams are met in every round
    decay: float = Field(1.0, gt=0, le=1)  # of a bigram's weights whenever it is met
    # Likeliest tokens of each of the target's laws to learn from, at most as many as `successors`.
    distribution_tokens: int = Field(0, ge=0)
    distribution_step: float = Field(
        0.04, gt=0, le=1e6
    )  # what a token of probability 1 gains by that
    reset_per_request: bool = False  # every request learns for itself and forgets it at its end


class AdedDrafter(WithoutMemory):
    """Drafts by searching a table of trigrams, which learns while it is used; threads share it.

    Args:
        settings: how it learns and searches.
        index: what it knows from the beginning, such as of a corpus.
    """

    def __init__(
        self, settings: AdedSettings | None = None, index: TrigramIndex | None = None
    ) -> None:
        self.settings = settings or AdedSettings()
        # Once, not for the table of every request.
        self.index = None if index is None else index.narrowed(self.settings.successors)
        self.version = "aded"
        self.bytes_per_token = TokenSession.bytes_per_token
        self.max_nodes = self.settings.num_nodes
        self.max_depth = self.settings.depth
        self.table = self._new_table()
        self.request_counter = None if self.settings.reset_per_request else RequestCounter()

    def new_session(self, sampling: Sampling, capacity: int, batch: int = 1) -> TokenSession:
        """Return a session for `batch` sequences of up to `capacity` tokens."""
        guessers = [self._guesser() for _ in range(batch)]
        return TokenSession(guessers, Budget(self.max_nodes, self.max_depth), capacity)

    def reset(self) -> None:
        """Forget what was learnt from requests, but not what was known from the beginning."""
        self.table.clear()
        if self.request_counter is not None:
            self.request_counter.reset()

    def _guesser(self) -> "TrigramGuesser":
        table = self._new_table() if self.settings.reset_per_request else self.table
        return TrigramGuesser(table, self.settings)

    def _new_table(self) -> TrigramTable:
        own = self.settings
        return TrigramTable(
            own.max_bigrams, own.successors, own.max_weight, own.decay, below=self.index
        )


class TrigramGuesser:
    """Learns from a sequence, and guesses how it goes on.

    Args:
        table: what it knows; others may learn into it, too.
        settings: how it learns and searches.
    """

    def __init__(self, table: TrigramTable, settings: AdedSettings) -> None:
        self.table = table
        self.settings = settings
        self.reads_logits = settings.distribution_tokens > 0

    def begin(self) -> bool:
        """Forget what earlier requests of a conversation have taught, if each is for itself."""
        if self.settings.reset_per_request:
            self.table.clear()
        return self.settings.reset_per_request

    def read(self, token_ids: Int64[np.ndarray, " tokens"], num_known: int) -> None:
        """Learn the trigrams that end in a new token, and those of the window."""
        if not self.settings.step or num_known == len(token_ids):
            return
        begin = min(num_known - 2, len(token_ids) - self.settings.window)
        bigrams, successors = trigrams_of(token_ids[max(0, begin) :])
        amounts = np.full(len(bigrams), self.settings.step, np.float32)
        self.table.add(bigrams, successors, amounts)

    def guess(
        self, token_ids: Int64[np.ndarray, " tokens"], num_nodes: int, depth: int
    ) -> Candidates:
        """Return the continuations that a search of the table visits most."""
        if len(token_ids) < 2:
            return Candidates.none()
        first, second = token_ids[-2:].tolist()
        return search(self.table, first, second, num_nodes, depth, self.settings.search)

    def read_logits(
        self, token_ids: Int64[np.ndarray, " tokens"], logits: Float[Tensor, "laws vocab"]
    ) -> None:
        """Learn what the target holds likely after each of the last tokens."""
        count = min(len(logits), len(token_ids) - 1)
        kept = min(self.settings.distribution_tokens, self.settings.successors, logits.shape[1])
        if count < 1:
            return
        probs, ids = logits[-count:].float().softmax(dim=-1).topk(kept, dim=-1)
        # One copy from the device: fp32 holds every id, which has at most TOKEN_BITS.
        found = torch.stack((probs, ids)).cpu().numpy()
        tokens = token_ids[-count - 1 :]
        amounts = found[0] * np.float32(self.settings.distribution_step)
        self.table.add_rows(packed(tokens[:-1], tokens[1:]), found[1].astype(np.int64), amounts)
