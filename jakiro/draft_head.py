"""Logits of the tokens that may be drafted, computed from a drafter's features."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from jakiro.target.ends import TargetEnds
from jakiro.target.weights import CONVERT, Product, WeightForm, allows_form, version_of


class DraftHead:
    """The target's head, restricted to the draft vocabulary, or a head of the drafter's own.

    The draft vocabulary consists of the tokens that may be drafted. A drafter's own head has rows
    for these tokens only, and the scales of the target's family do not apply to its logits.

    The rows of the head's matrix that belong to the draft vocabulary are copied on first use, so
    that drafting does not read the other rows. They are copied again after the target's head has
    changed. If the head is not exactly an `nn.Linear` (for example, if the head is quantized), all
    logits are computed, and those of the draft vocabulary are selected.

    The copy may have another format than the target's head, because acceptance uses the draft
    distribution that follows from these logits, whatever they are. A head that cannot be converted
    to the requested format is used in its own format. Gradients flow only through logits that are
    computed in the format "own".

    Args:
        token_ids: ids of the tokens that may be drafted, in ascending order; None if all tokens may
            be drafted.
        norm: norm that is applied to features first; None for no norm.
        own: the drafter's own head, a linear layer or its adapter; None to use the target's.
    """

    def __init__(
        self,
        target: TargetEnds,
        token_ids: Int[Tensor, " drafted"] | None,
        form: WeightForm = "own",
        norm: nn.Module | None = None,
        own: nn.Module | None = None,
    ) -> None:
        self.target = target
        self.token_ids = None if token_ids is None else token_ids.to(target.device)
        self.form = form
        self.norm = norm
        self.own = own
        # The version of the copied rows, and a function that multiplies by them.
        self._copy: tuple[object, Product] | None = None

    def logits(self, features: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch drafted"]:
        """Return the logits of the draft vocabulary.

        They have the target's dtype, or float32 if they were computed with int8 weights.
        """
        if self.norm is not None:
            features = self.norm(features)
        if self.own is not None:
            product: Product = self.own
            if self.form != "own" and type(self.own) is nn.Linear:
                product = self._product_of(self.own)
            return product(features.contiguous())
        # A linear layer splits a non-contiguous input into many small matrix products, which is
        # four times slower on a CPU.
        features = features.to(self.target.dtype).contiguous()
        head = self.target.head
        if type(head) is nn.Linear and not self._is_targets_own:
            return self.target.adjusted(self._product_of(head)(features))
        logits = self.target.logits(features)
        return logits[..., self.token_ids] if self._selects_rows else logits

    def log_probs(
        self, features: Float[Tensor, "*batch hidden"]
    ) -> Float[Tensor, "*batch drafted"]:
        """Return the float32 log-probabilities of the draft vocabulary."""
        return self.logits(features).log_softmax(dim=-1, dtype=torch.float32)

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The trained parameters of the drafter that the head computes with."""
        modules = [part for part in (self.norm, self.own) if part is not None]
        parameters = (parameter for part in modules for parameter in part.parameters())
        return tuple(parameter for parameter in parameters if parameter.requires_grad)

    @property
    def _is_targets_own(self) -> bool:
        """Whether the target itself has all rows in the requested format."""
        is_there = self.form == "own" or (self.form == "packed" and self.target.head_is_packed)
        return not self._selects_rows and is_there

    @property
    def _selects_rows(self) -> bool:
        """Whether the target's head has rows of other tokens than the draft vocabulary."""
        return self.token_ids is not None and self.target.head_ids is None

    def _product_of(self, head: nn.Linear) -> Product:
        """Return a function that multiplies by the copied rows; copy them again if they changed."""
        version = version_of(head.weight), None if head.bias is None else version_of(head.bias)
        if self._copy is None or self._copy[0] != version:
            self._copy = version, self._copied(head)
        return self._copy[1]

    def _copied(self, head: nn.Linear) -> Product:
        weight, bias = head.weight.detach(), None if head.bias is None else head.bias.detach()
        if self.token_ids is not None and self._selects_rows and self.own is None:
            self.token_ids = self.token_ids.to(weight.device)
            weight, bias = weight[self.token_ids], None if bias is None else bias[self.token_ids]
        form = self.form if allows_form(head, self.form) else "own"
        return CONVERT[form](weight, bias)
