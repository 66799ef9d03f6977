"""An oracle drafter with a fixed number of accepted tokens per decoding step."""

from collections.abc import Sequence

import torch

from inference.draft_tree import ROOT, CandidateKind, DraftTree
from inference.protocol import Budget, Committed, Drafter, DraftSession
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import StepRandom


class OracleDrafter(Drafter):
    """Proposes trees for greedy decoding, built from continuations that are known in advance.

    Each of the first `num_right` levels contains two siblings, a wrong candidate and then the right
    candidate. All other nodes are wrong candidates on level `num_right` + 1.

    Args:
        known: tokens of each sequence: its prompt, then its continuation, which must be longer than
            the text to be generated.
        vocab_size: size of the target's vocabulary.
        device: device of the target.
        num_right: number of accepted candidates of every tree.
        num_nodes: number of candidates of every tree.
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
        self.num_nodes = num_nodes
        below = num_nodes - 2 * num_right
        self.max_siblings = max(2, below)
        levels = range(1, num_right + 1)
        parents = [2 * level - 3 for level in levels for _ in range(2)]
        self.parent = torch.tensor([[*parents, *[2 * num_right - 1] * below]], device=device)
        depths = [level for level in levels for _ in range(2)]
        self.depth = torch.tensor([[*depths, *[num_right + 1] * below]], device=device)
        self.zeros = torch.zeros_like(self.parent)
        assert int(self.parent[0, 0]) == ROOT

    @property
    def max_nodes(self) -> int:
        """The number of nodes in every tree."""
        return self.num_nodes

    @property
    def max_depth(self) -> int:
        """The length of the longest path in every tree."""
        return self.num_right + 1

    def new_session(self, sampling: Sampling, capacity: int, batch: int = 1) -> "OracleSession":
        """Return a session for `batch` sequences.

        Args:
            sampling: options by which tokens are selected.
            capacity: largest number of tokens of a sequence, including the root and a draft tree.
            batch: number of sequences.
        """
        return OracleSession(self, batch)

    def tree(self, lengths: Sequence[int], indices: Sequence[int]) -> DraftTree:
        """Return the trees below the roots.

        Args:
            lengths: position of each root.
            indices: for each tree, the index of its sequence in `known`.
        """
        pairs = zip(indices, lengths, strict=True)
        tokens = [self._tokens(self.known[index], length) for index, length in pairs]
        device, shape = self.zeros.device, (len(tokens), -1)
        zeros = self.zeros.expand(shape)
        return DraftTree(
            token_ids=torch.tensor(tokens, device=device),
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
        chain = [token for best in right[:-1] for token in ((best + 1) % self.vocab_size, best)]
        below = range(1, self.max_nodes - 2 * self.num_right + 1)
        return [*chain, *((right[-1] + offset) % self.vocab_size for offset in below)]


class OracleSession(DraftSession):
    """A session that tracks how many tokens of each known sequence have been decoded.

    Args:
        drafter: drafter of the session.
        batch: number of sequences.
    """

    lengths: tuple[int, ...] = ()

    def __init__(self, drafter: OracleDrafter, batch: int) -> None:
        self.drafter = drafter
        self.lengths = (0,) * batch
        self.indices = list(range(batch))

    def advance(self, committed: Committed) -> None:
        """Store the positions of the roots."""
        self.lengths = committed.base_length

    def propose(self, budget: Budget, random: StepRandom) -> DraftTree:
        """Return the trees below the roots.

        Args:
            budget: limits of every tree; they are ignored.
            random: random numbers of this step, which are not used.
        """
        return self.drafter.tree(self.lengths, self.indices)

    def rollback(self, length: int) -> None:
        """Discard everything from position `length` on."""
        self.lengths = tuple(min(length, own) for own in self.lengths)

    def select_sequences(self, indices: Sequence[int]) -> None:
        """Keep only the sequences at these batch indices, in this order."""
        self.lengths = tuple(self.lengths[index] for index in indices)
        self.indices = [self.indices[index] for index in indices]

    def append_sequences(self, other: DraftSession) -> None:
        """Add the sequences of another session."""
        assert isinstance(other, OracleSession)
        self.lengths += other.lengths
        self.indices += other.indices
