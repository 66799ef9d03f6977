"""Oracle drafter with a fixed number of accepted drafts per decoding step."""

from collections.abc import Sequence

import torch

from inference.draft_tree import ROOT, CandidateKind, DraftTree
from inference.drafters.base import WithoutMemory
from inference.protocol import Budget, Committed, VerifyResult
from inference.sampling import Sampling


class OracleDrafter(WithoutMemory):
    """A drafter for greedy decoding with continuations that are known beforehand.

    Each of the first `num_right` levels has a wrong candidate and the right candidate, in this
    order; all further nodes are wrong and form the next level.

    Args:
        known: prompt and continuation of each sequence, longer than the decoded text.
        vocab_size: size of the target's vocabulary.
        device: device of the target.
        num_right: number of accepted candidates of every tree.
        num_nodes: number of nodes of every tree.
    """

    def __init__(
        self,
        known: Sequence[Sequence[int]],
        vocab_size: int,
        device: torch.device,
        num_right: int = 3,
        num_nodes: int = 8,
    ) -> None:
        self.known = known
        self.vocab_size = vocab_size
        self.num_right = num_right
        self.version = "oracle"
        self.bytes_per_token = 0
        self.max_nodes = num_nodes
        self.max_depth = num_right + 1
        below = num_nodes - 2 * num_right
        self.max_siblings = max(2, below)
        levels = range(1, num_right + 1)
        parents = [2 * level - 3 for level in levels for _ in range(2)]
        self.parent = torch.tensor([[*parents, *[2 * num_right - 1] * below]], device=device)
        depths = [level for level in levels for _ in range(2)]
        self.depth = torch.tensor([[*depths, *[num_right + 1] * below]], device=device)
        self.zeros = torch.zeros_like(self.parent)
        assert int(self.parent[0, 0]) == ROOT

    def new_session(self, sampling: Sampling, capacity: int, batch: int = 1) -> "OracleSession":
        """Return a session.

        Args:
            sampling: sampling of the session, which is ignored.
            capacity: number of tokens, which is ignored.
            batch: number of sequences.
        """
        return OracleSession(self, batch)

    def tree(self, lengths: Sequence[int], indices: Sequence[int]) -> DraftTree:
        """Return the trees below the roots at positions `lengths`.

        Args:
            lengths: positions of the roots.
            indices: indices of the known sequences.
        """
        pairs = zip(indices, lengths, strict=True)
        token_ids = [self._tokens(self.known[index], length) for index, length in pairs]
        device, shape = self.zeros.device, (len(token_ids), -1)
        zeros = self.zeros.expand(shape)
        return DraftTree(
            token_ids=torch.tensor(token_ids, device=device),
            parent=self.parent.expand(shape),
            depth=self.depth.expand(shape),
            score=zeros.float(),
            kind=zeros + int(CandidateKind.DETERMINISTIC),
            rank=torch.arange(self.max_nodes, device=device).expand(shape),
            proposer_id=zeros,
            is_valid=zeros == 0,
            base_length=torch.tensor(lengths, device=device),
            max_depth=self.max_depth,
            max_siblings=self.max_siblings,
        )

    def _tokens(self, known: Sequence[int], length: int) -> list[int]:
        right = [*known[length + 1 : length + self.num_right + 2]]
        right += [0] * (self.num_right + 1 - len(right))
        chain = [
            candidate
            for token in right[:-1]
            for candidate in ((token + 1) % self.vocab_size, token)
        ]
        below = range(1, self.max_nodes - 2 * self.num_right + 1)
        return [*chain, *((right[-1] + offset) % self.vocab_size for offset in below)]


class OracleSession:
    """A session that keeps the length of each sequence.

    Args:
        drafter: drafter of the session.
        batch: number of sequences.
    """

    def __init__(self, drafter: OracleDrafter, batch: int) -> None:
        self.drafter = drafter
        self.lengths = (0,) * batch
        self.indices = list(range(batch))

    def advance(self, committed: Committed) -> None:
        """Store the positions of the roots."""
        self.lengths = committed.base_length

    def propose(self, budget: Budget, generators: Sequence[torch.Generator]) -> DraftTree:
        """Return the trees below the roots, whatever the budget.

        Args:
            budget: limits of the tree, which are ignored.
            generators: random streams, which are ignored.
        """
        return self.drafter.tree(self.lengths, self.indices)

    def on_verified(self, result: VerifyResult) -> None:
        """Do nothing."""

    def on_finished(self, index: int, token_ids: Sequence[int]) -> None:
        """Do nothing.

        Args:
            index: batch index of the sequence.
            token_ids: prompt and all new tokens.
        """

    def rollback(self, length: int) -> None:
        """Go back to position `length`."""
        self.lengths = tuple(min(length, current) for current in self.lengths)

    def select_sequences(self, indices: Sequence[int]) -> None:
        """Keep only the sequences at these batch indices."""
        self.lengths = tuple(self.lengths[index] for index in indices)
        self.indices = [self.indices[index] for index in indices]

    def set_sampling(self, sampling: Sampling) -> None:
        """Do nothing: the oracle ignores sampling."""

    def reserve(self, capacity: int) -> None:
        """Do nothing: the oracle needs no room."""

    def close(self) -> None:
        """Do nothing: there is nothing to free."""
