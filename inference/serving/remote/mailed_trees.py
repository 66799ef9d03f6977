"""A drafter that drafts nothing: its trees come from another machine."""

from collections.abc import Sequence

from jaxtyping import Int
from torch import Tensor

from inference.draft_tree import DraftTree
from inference.protocol import Budget, Committed, Drafter, DraftSession
from inference.remote.messages import TreeLimits
from inference.remote.received_tree import to_draft_tree
from inference.remote.tree_tensors import TreeTensors
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import StepRandom


class MailedTrees(Drafter):
    """The drafter of one sequence, whose next tree is set before each decoding step."""

    proposer_names = ("device",)

    def __init__(self, limits: TreeLimits, hidden_states: tuple[int, ...] = ()) -> None:
        self._limits = limits
        self.hidden_states = hidden_states
        self.tree: TreeTensors | None = None

    @property
    def max_nodes(self) -> int:
        """The largest number of candidates in a tree."""
        return self._limits.largest

    @property
    def max_depth(self) -> int:
        """The length of the longest path in a tree."""
        return max(self._limits.max_depth, self._limits.max_chain)

    def new_session(self, sampling: Sampling, capacity: int, batch: int = 1) -> "MailSession":
        """Return the session of one sequence."""
        assert batch == 1, "each session has trees of its own"
        return MailSession(self)


class MailSession(DraftSession):
    """A session that passes trees on."""

    lengths: tuple[int, ...] = (0,)

    def __init__(self, drafter: MailedTrees) -> None:
        self._drafter = drafter
        self._base_length: Int[Tensor, " batch"] | None = None

    def advance(self, committed: Committed) -> None:
        """Follow the tokens that became final."""
        self.lengths, self._base_length = committed.base_length, committed.end

    def propose(self, budget: Budget, random: StepRandom) -> DraftTree:
        """Return the tree that was set, whose size has been checked."""
        assert self._base_length is not None, "advance before propose"
        tree, self._drafter.tree = self._drafter.tree, None
        if tree is None:
            return DraftTree.empty(self._base_length)
        return to_draft_tree(tree, self._base_length)

    def rollback(self, length: int) -> None:
        """Discard everything from position `length` on."""
        self.lengths = tuple(min(length, own) for own in self.lengths)

    def select_sequences(self, indices: Sequence[int]) -> None:
        """Keep only the sequences at these batch indices."""
        self.lengths = tuple(self.lengths[index] for index in indices)
