"""The head that computes logits of the tokens that may be drafted from a drafter's features."""

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear

from jakiro.target.adapter import TargetAdapter


class DraftHead:
    """The target's head, or the rows of its matrix that belong to the drafted tokens.

    These rows are copied on first use, so that a draft does not read the other rows, and copied
    again when the target's head has changed. If the head is not exactly an `nn.Linear` (for example
    a quantised layer), all logits are computed and those of the drafted tokens are picked out.

    Args:
        target: adapter of the target whose head is used.
        token_ids: ids of the tokens that may be drafted, ascending; None for all tokens.
    """

    def __init__(self, target: TargetAdapter, token_ids: Int[Tensor, " drafted"] | None) -> None:
        self.target = target
        self.token_ids = None if token_ids is None else token_ids.to(target.device)
        self._rows: tuple[Tensor, Tensor | None] | None = None
        self._copied_from: tuple[object, ...] | None = None

    def logits(self, features: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch drafted"]:
        """Return the logits of the drafted tokens, in the target's dtype."""
        # Contiguous, else a linear layer becomes many small products: four times slower on a CPU.
        features = features.to(self.target.dtype).contiguous()
        if self.token_ids is None:
            return self.target.logits(features)
        if type(self.target.head) is not nn.Linear:
            return self.target.logits(features)[..., self.token_ids]
        return self.target.adjusted(linear(features, *self._rows_of(self.target.head)))

    def log_probs(self, features: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:
        """Return log-probabilities of all tokens in float32, -inf for tokens never drafted."""
        log_probs = self.logits(features).float().log_softmax(dim=-1)
        if self.token_ids is None:
            return log_probs
        whole = log_probs.new_full(
            (*log_probs.shape[:-1], self.target.spec.vocab_size), float("-inf")
        )
        whole[..., self.token_ids] = log_probs
        return whole

    def _rows_of(self, head: nn.Linear) -> tuple[Tensor, Tensor | None]:
        state = _version_of(head.weight)
        if self._rows is None or state != self._copied_from:
            assert self.token_ids is not None
            self.token_ids = self.token_ids.to(head.weight.device)
            bias = None if head.bias is None else head.bias.detach()[self.token_ids]
            self._rows = head.weight.detach()[self.token_ids], bias
            self._copied_from = state
        return self._rows


def _version_of(weight: Tensor) -> tuple[object, ...]:
    """Return a key that differs between tensors, and before and after a tensor is written to."""
    version = 0 if weight.is_inference() else weight._version
    return weight.data_ptr(), version, weight.device, weight.dtype
