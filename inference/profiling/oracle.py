"""A drafter that knows the answer: exactly as many drafts of every round are accepted as wanted."""

from collections.abc import Sequence

import torch

from inference.draft_tree import ROOT, CandidateKind, DraftTree
from inference.drafters.base import WithoutMemory
from inference.protocol import Budget, Committed, VerifyResult
from inference.sampling import Sampling


class OracleDrafter(WithoutMemory):
    """Drafts for greedy decoding from continuations that are known beforehand.

    Each of the first `num_right` levels has a wrong candidate and the right one, in this order;
    all further nodes are wrong and stand one level below.

    Args:
        known: prompt and continuation of each sequence, longer than what is decoded.
        vocab_size: of the target.
        device: of the target.
        num_right: candidates of every tree that are accepted.
        num_nodes: of every tree.
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
        """Return a session."""
        return OracleSession(self, batch)

    def tree(self, lengths: Sequence[int], places: Sequence[int]) -> DraftTree:
        """Return the trees below the roots at positions `lengths`.

        Args:
            lengths: positions of the roots.
            places: which known sequences these are.
        """
        pairs = zip(places, lengths, strict=True)
        rows = [self._tokens(self.known[place], length) for place, length in pairs]
        device, shape = self.zeros.device, (len(rows), -1)
        zeros = self.zeros.expand(shape)
        return DraftTree(
            token_ids=torch.tensor(rows, device=device),
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
        chain = [token for one in right[:-1] for token in ((one + 1) % self.vocab_size, one)]
        below = range(1, self.max_nodes - 2 * self.num_right + 1)
        return [*chain, *((right[-1] + offset) % self.vocab_size for offset in below)]


class OracleSession:
    """Knows how far each sequence has got."""

    def __init__(self, drafter: OracleDrafter, batch: int) -> None:
        self.drafter = drafter
        self.lengths = (0,) * batch
        self.places = list(range(batch))

    def advance(self, committed: Committed) -> None:
        """Note the positions of the roots."""
        self.lengths = committed.base_length

    def propose(self, budget: Budget, generators: Sequence[torch.Generator]) -> DraftTree:
        """Return the trees below the roots, whatever the budget."""
        return self.drafter.tree(self.lengths, self.places)

    def on_verified(self, result: VerifyResult) -> None:
        """Learn nothing."""

    def on_finished(self, place: int, token_ids: Sequence[int]) -> None:
        """Learn nothing."""

    def rollback(self, length: int) -> None:
        """Go back to position `length`."""
        self.lengths = tuple(min(length, one) for one in self.lengths)

    def select_sequences(self, places: Sequence[int]) -> None:
        """Forget all sequences but those at these places."""
        self.lengths = tuple(self.lengths[place] for place in places)
        self.places = [self.places[place] for place in places]

    def set_sampling(self, sampling: Sampling) -> None:
        """Draft as before."""

    def reserve(self, capacity: int) -> None:
        """Nothing to make room for."""

    def close(self) -> None:
        """Nothing to free."""
