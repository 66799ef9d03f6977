"""Logits of the tokens that may be drafted, computed from a drafter's features."""

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear

from jakiro.target.adapter import TargetAdapter
from jakiro.target.packed_linear import version_of


class DraftHead:
    """The target's head, restricted to the draft vocabulary (the tokens that may be drafted).

    The rows of the head's matrix that belong to the draft vocabulary are copied on first use, so
    that drafting does not read the other rows. They are copied again after the target's head has
    changed. If the head is not exactly an `nn.Linear` (for example, if the head is quantized), all
    logits are computed, and those of the draft vocabulary are selected.

    Args:
        target: adapter of the target whose head is used.
        token_ids: ids of the tokens that may be drafted, in ascending order; None if all tokens may
            be drafted.
    """

    def __init__(self, target: TargetAdapter, token_ids: Int[Tensor, " drafted"] | None) -> None:
        self.target = target
        self.token_ids = None if token_ids is None else token_ids.to(target.device)
        self._rows: tuple[Tensor, Tensor | None] | None = None
        self._copied_from: tuple[object, ...] | None = None

    def logits(self, features: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch drafted"]:
        """Return the logits of the draft vocabulary, in the target's dtype."""
        # A linear layer splits a non-contiguous input into many small matrix products, which is
        # four times slower on a CPU.
        features = features.to(self.target.dtype).contiguous()
        if self.token_ids is None:
            return self.target.logits(features)
        if type(self.target.head) is not nn.Linear:
            return self.target.logits(features)[..., self.token_ids]
        return self.target.adjusted(linear(features, *self._rows_of(self.target.head)))

    def log_probs(self, features: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:
        """Return the float32 log-probabilities of all tokens, -inf outside the draft vocabulary."""
        log_probs = self.logits(features).float().log_softmax(dim=-1)
        if self.token_ids is None:
            return log_probs
        whole = log_probs.new_full(
            (*log_probs.shape[:-1], self.target.spec.vocab_size), float("-inf")
        )
        whole[..., self.token_ids] = log_probs
        return whole

    def _rows_of(self, head: nn.Linear) -> tuple[Tensor, Tensor | None]:
        state = version_of(head.weight)
        if self._rows is None or state != self._copied_from:
            assert self.token_ids is not None
            self.token_ids = self.token_ids.to(head.weight.device)
            bias = None if head.bias is None else head.bias.detach()[self.token_ids]
            self._rows = head.weight.detach()[self.token_ids], bias
            self._copied_from = state
        return self._rows
