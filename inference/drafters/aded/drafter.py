"""A training-free drafter with a trigram table that adapts to the text (ADED, arXiv 2407.12021)."""

import numpy as np
import torch
from jaxtyping import Float, Int64
from pydantic import Field
from torch import Tensor

from inference.drafters.aded.index import TrigramIndex, packed, trigrams_of
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
    # Factor by which a bigram's weights are multiplied each time the bigram is learned.
    decay: float = Field(1.0, gt=0, le=1)
    # Number of most likely tokens to learn from each distribution of the target, at most
    # `successors`; 0 to learn nothing from distributions.
    distribution_tokens: int = Field(0, ge=0)
    # Weight that a token gains from a distribution of the target, per unit of its probability.
    distribution_step: float = Field(0.04, gt=0, le=1e6)
    # Whether to discard what was learned from earlier requests at the start of each request.
    reset_per_request: bool = False


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
        self.table = self._new_table()
        if self.settings.reset_per_request:
            self.request_counter = None

    def __repr__(self) -> str:
        sizes = f"max_nodes={self.max_nodes}, max_depth={self.max_depth}"
        known = 0 if self.index is None else len(self.index.keys)
        return f"AdedDrafter({sizes}, known_bigrams={known})"

    def new_proposer(self) -> "TrigramProposer":
        """Return a new proposer; its table is shared, unless `reset_per_request` is set."""
        table = self._new_table() if self.settings.reset_per_request else self.table
        return TrigramProposer(table, self.settings)

    def reset(self) -> None:
        """Discard what was learned from requests, but not what was known from the beginning."""
        self.table.clear()
        super().reset()

    def _new_table(self) -> TrigramTable:
        own = self.settings
        return TrigramTable(
            own.max_bigrams, own.successors, own.max_weight, own.decay, below=self.index
        )


class TrigramProposer(TokenProposer):
    """Learns the trigrams of a sequence, and proposes its continuations."""

    def __init__(self, table: TrigramTable, settings: AdedSettings) -> None:
        self.table = table
        self.settings = settings
        self.reads_logits = settings.distribution_tokens > 0

    def begin(self) -> bool:
        """Discard what was learned from earlier requests, if requests have separate tables."""
        if self.settings.reset_per_request:
            self.table.clear()
        return self.settings.reset_per_request

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

    def read_logits(
        self, token_ids: Int64[np.ndarray, " tokens"], logits: Float[Tensor, "steps vocab"]
    ) -> None:
        """Learn the tokens that the target finds most likely after each of the last tokens."""
        count = min(len(logits), len(token_ids) - 1)
        kept = min(self.settings.distribution_tokens, self.settings.successors, logits.shape[1])
        if count < 1:
            return
        probs, ids = logits[-count:].float().softmax(dim=-1).topk(kept, dim=-1)
        # Ids and probabilities are copied from the device together: float32 represents every id
        # exactly, because an id has at most TOKEN_BITS bits.
        found = torch.stack((probs, ids)).cpu().numpy()
        tokens = token_ids[-count - 1 :]
        amounts = found[0] * np.float32(self.settings.distribution_step)
        self.table.add_rows(packed(tokens[:-1], tokens[1:]), found[1].astype(np.int64), amounts)
