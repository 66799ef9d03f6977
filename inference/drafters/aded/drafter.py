"""A training-free drafter with a trigram table that adapts to the text (ADED, arXiv 2407.12021)."""

import numpy as np
from jaxtyping import Int64
from pydantic import Field

from inference.drafters.aded.index import TrigramIndex, trigrams_of
from inference.drafters.aded.search import SearchSettings, search
from inference.drafters.aded.table import TrigramTable
from inference.drafters.base import TokenDrafter, TokenProposer
from inference.drafters.candidates import Candidates
from inference.protocol import AdaptiveDrafter
from inference.trees.limits import MOST_CANDIDATES
from jakiro.utils.settings import Settings


class AdedSettings(Settings):
    """Settings for learning trigrams and for searching the table."""

    # Largest number of candidates in a tree.
    num_nodes: int = Field(24, ge=1, le=MOST_CANDIDATES)
    depth: int = Field(8, ge=1, le=MOST_CANDIDATES)  # largest number of tokens on a path
    search: SearchSettings = SearchSettings()
    # Largest number of learned bigrams; each takes 112 bytes if there are 12 successors.
    max_bigrams: int = Field(2**17, ge=1, le=2**28)  # 30 GB
    successors: int = Field(12, ge=1, le=256)  # largest number of successors of each bigram
    # Weight that a trigram gains at each occurrence, 0.04 in the paper; 0 to learn nothing from
    # texts.
    step: float = Field(0.1, ge=0, le=1e6)
    max_weight: float = Field(3.0, gt=0, le=1e6)  # largest weight of a trigram
    # Number of most recent tokens whose trigrams are learned again at every decoding step.
    window: int = Field(16, ge=3)


class AdedDrafter(TokenDrafter, AdaptiveDrafter):
    """Drafter that searches a table of trigrams, which decoding updates; thread-safe.

    Example:
        decoder = SpeculativeDecoder(target, AdedDrafter(AdedSettings(num_nodes=16)), tokenizer)
        output = decoder.generate("def main(", max_new_tokens=16, temperature=0)
    """

    def __init__(
        self, settings: AdedSettings | None = None, index: TrigramIndex | None = None
    ) -> None:
        self.settings = settings or AdedSettings()
        super().__init__("aded", self.settings.num_nodes, self.settings.depth)
        self.proposer_names = ("trigrams",)
        # Surplus successors are removed once here, instead of for the table of every request.
        self.index = None if index is None else index.narrowed(self.settings.successors)
        own = self.settings
        self.table = TrigramTable(own.max_bigrams, own.successors, own.max_weight, below=self.index)

    def new_proposer(self) -> "TrigramProposer":
        """Return a new proposer; all proposers share the table."""
        return TrigramProposer(self.table, self.settings)

    def reset(self) -> None:
        """Discard what was learned from requests, but not what was known from the beginning."""
        self.table.clear()
        super().reset()


class TrigramProposer(TokenProposer):
    """Learns the trigrams of a sequence, and proposes its continuations."""

    def __init__(self, table: TrigramTable, settings: AdedSettings) -> None:
        self.table = table
        self.settings = settings

    def read(self, token_ids: Int64[np.ndarray, " tokens"], num_known: int) -> None:
        """Learn the trigrams that end with a new token, and those of the last `window` tokens."""
        if not self.settings.step or num_known == len(token_ids):
            return
        begin = min(num_known - 2, len(token_ids) - self.settings.window)
        bigrams, successors = trigrams_of(token_ids[max(0, begin) :])
        amounts = np.full(len(bigrams), self.settings.step, np.float32)
        self.table.add(bigrams, successors, amounts)

    def draft(
        self, token_ids: Int64[np.ndarray, " tokens"], num_nodes: int, depth: int
    ) -> Candidates:
        """Return the continuations that a search of the table visits most often."""
        if len(token_ids) < 2:
            return Candidates.none()
        first, second = token_ids[-2:].tolist()
        return search(self.table, first, second, num_nodes, depth, self.settings.search)
