"""The target's processed distributions after the nodes of a tree."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from inference.draft_tree import SequenceTree
from inference.sampling.options import Sampling, widened
from jakiro.errors import NumericalError


class ProcessedDistribution:
    """The target's processed distribution after each node, given the path to that node.

    Args:
        emitted: all tokens up to and including the root; later, more tokens may be appended to
            this list.
    """

    def __init__(
        self,
        logits: Float[Tensor, "queries vocab"],
        emitted: list[int],
        tree: SequenceTree,
        sampling: Sampling,
    ) -> None:
        self.logits = logits
        self.emitted = emitted
        self.length = len(emitted)
        self.tree = tree
        self.sampling = sampling

    def __call__(self, node: int) -> Float[Tensor, " vocab"]:
        """Return the distribution after `node` (or ROOT), in float32 or higher precision."""
        probs = self.sampling.probs(self.scores(node)[None])[0]
        check_finite(probs, self.raw(node), position=self.position(node))
        return probs

    def best(self, node: int) -> int:
        """Return the most likely token after `node` (or ROOT)."""
        scores, token = self.scores(node).max(dim=-1)
        check_finite(scores, self.raw(node), position=self.position(node))
        return int(token)

    def position(self, node: int) -> int:
        """Return the position of the token that follows `node` (or ROOT)."""
        return self.length + len(self.tree.path(node))

    def raw(self, node: int) -> Float[Tensor, " vocab"]:
        """Return the target's raw logits after `node` (or ROOT)."""
        return self.logits[node + 1]

    def scores(self, node: int) -> Float[Tensor, " vocab"]:
        """Return the processed logits after `node` (or ROOT)."""
        return self.sampling.processed(self._prefix(node), widened(self.raw(node)[None]))[0]

    def _prefix(self, node: int) -> Int[Tensor, "1 tokens"]:
        if self.sampling.is_prefix_free:
            return torch.empty(1, 0, dtype=torch.long, device=self.logits.device)
        drafted = [self.tree.token_ids[index] for index in self.tree.path(node)]
        return torch.tensor([[*self.emitted[: self.length], *drafted]], device=self.logits.device)


def check_finite(values: Tensor, logits: Float[Tensor, " vocab"], position: int) -> None:
    """Raise an error if the largest value is not finite; the message names the cause."""
    if bool(values.max().isfinite()):
        return
    if bool(logits.isnan().any() | logits.isposinf().any() | logits.isneginf().all()):
        raise NumericalError(
            f"the target's logits for position {position} are not finite",
            expected="finite numbers, or -inf for tokens that cannot follow",
            got="NaN or inf",
            remedy="load the target in float32 or bfloat16, and check its weights",
        )
    raise NumericalError(
        f"the logits processors leave no token for position {position}",
        expected="at least one token with a finite score",
        got="none",
        remedy="relax the processors or constraints",
    )
