"""A path of any length below a root, which a trained drafter writes token by token."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from inference.draft_tree import ROOT, DraftTree
from inference.drafters.trained.drafter import TrainedSession
from inference.sampling.random_numbers import StepRandom
from inference.trees.builder import TreeBuilder, TreeLevel
from inference.trees.shape import TreeShape
from jakiro.target.attention import without_cudnn


class TrainedChain:
    """Tokens after the root of a session's only sequence, without memory of their own.

    Each token takes a pass of the trunk, which reads the memory up to the root, and the drafter's
    own keys, values and features after it. The session's next tree overwrites them.

    The session must neither advance nor propose while its chain is in use.
    """

    def __init__(self, session: TrainedSession, longest: int) -> None:
        (length,) = session.lengths
        session.reserve(length + 1 + longest)
        self._session = session
        self._longest = longest
        self._shape = TreeShape(
            autoregressive_levels=1,
            parallel_levels=0,
            children=1,
            breadth=1,
            num_nodes=1,
            sampled=session.is_sampled,
        )
        self._pass = session.start_tree(longest + 1, breadth=1)
        self.draft_ids = self._pass.draft_ids
        self._count = 0  # number of tokens that follow the root
        self._last: TreeLevel | None = None  # the last of them; None for the root
        self._is_read = False  # whether a pass has read this token

    def propose(self, token_ids: Sequence[int], random: StepRandom) -> DraftTree:
        """Return a tree with one candidate below the last token.

        Args:
            token_ids: all tokens after the root, at least one more than in an earlier call; they
                need not be those that were proposed.
        """
        for token in token_ids[self._count :]:
            if not self._is_read:
                self._read()
            self._follow(token)
        assert not self._is_read, "each call needs another token"
        assert self._count < self._longest, "the path is full"
        builder = TreeBuilder(self._shape, self._session.sampling, random)
        with without_cudnn(self._session.base_length.device):
            return builder.build(self, self._session.base_length + self._count)

    def joint(
        self, _depth: int, _frontier: TreeLevel | None
    ) -> Float[Tensor, "batch f components drafted"]:
        """Return `log(w_e p_e(t))` of each token t below the last token, as `TreePass` does."""
        return self._read()

    def _read(self) -> Tensor:
        self._is_read = True
        return self._pass.joint(self._count + 1, self._last)

    def _follow(self, token_id: int) -> None:
        """Make a token the last one."""
        zero = torch.zeros_like(self._pass.root)
        self._last = TreeLevel(
            token_ids=zero + token_id,
            origin=zero,
            proposer_id=zero,
            score=zero.float(),
            parents=zero + (ROOT if self._count == 0 else self._count - 1),
            columns=zero,
        )
        self._count += 1
        self._is_read = False
