"""Mixture of experts (arXiv 2502.06282): decoupled experts with a shared router."""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import silu

from moa.layers import ExpertSlots, RMSNorm

Combine = Literal["sum", "mixture"]


class ExpertsOutput(NamedTuple):
    """Predicted target features of every level, as components of one distribution per level.

    Level 0 predicts the target's feature at the query's own position; level k predicts the feature
    k positions later, without access to the tokens in between. There is one component if `combine`
    is "sum", and one component per active expert if it is "mixture".

    Attributes:
        gate: the router's weight for each expert, active or not, used for load balancing and
            statistics.
        state: input of the target's tail layers; None unless `features` is the output of these
            layers.
        chosen: indices of the active experts, in descending order of their weights; None if all
            experts are active.
        waiting: the trunk's vectors of all levels, if the experts of parallel levels run once the
            token before is known.
    """

    features: Float[Tensor, "*batch levels components hidden"]
    log_weights: Float[Tensor, "*batch components"]
    gate: Float[Tensor, "*batch experts"]
    state: Float[Tensor, "*batch hidden"] | None = None
    chosen: Int[Tensor, "*batch active"] | None = None
    waiting: Float[Tensor, "*batch levels hidden"] | None = None

    def with_tail_output(self, features: Float[Tensor, "*batch hidden"]) -> "ExpertsOutput":
        """Return a copy whose only feature is the given output of the target's tail layers."""
        return self._replace(features=features[..., None, None, :], state=self.mean_feature)

    def scattered(
        self,
        sequence: Int[Tensor, "batch 1"],
        columns: Int[Tensor, "batch few"],
        shape: tuple[int, ...],
    ) -> "ExpertsOutput":
        """Return the output at all positions of sequences, with zeros where nothing was drafted.

        Args:
            sequence: index of the sequence of each group of queries.
            columns: position of each query in its sequence.
            shape: number of sequences, and their length.
        """

        def scatter(part: Tensor) -> Tensor:
            zeros = part.new_zeros((*shape, *part.shape[2:]))
            return zeros.index_put((sequence, columns), part)

        features, log_weights, gate = map(scatter, self[:3])
        waiting = None if self.waiting is None else scatter(self.waiting)
        return ExpertsOutput(features, log_weights, gate, waiting=waiting)

    @property
    def mean_feature(self) -> Float[Tensor, "*batch hidden"]:
        """The feature at the query's own position, averaged over components: `sum_e w_e F1_e`."""
        return mean_over_components(self.features[..., 0, :, :], self.log_weights)


class MixtureOfExperts(nn.Module):
    """SwiGLU experts whose outputs give one draft distribution per level.

    Let x be the trunk's vector, n the normalized x, `h_e` the inner activation of expert e on n,
    `E_e = D_e h_e` its output, and `w_e` its weight from the router. The published contrast uses
    separate weights `v_e` from the router.

    - "sum": `F1 = x + sum_e w_e E_e`; one feature and one softmax (published dynamic Jakiro).
    - "mixture": `F1_e = x + E_e`; the distribution is `sum_e w_e softmax(F1_e)`. Experts can prefer
      different tokens, but sibling candidates are sampled from one calibrated distribution
      without replacement, so they are never the same token.

    Each parallel level has separate down-projections `D'_e`, except the published contrast:

    - "sum", level 1, with `contrastive_head`: `F2 = x + v_top E_top - sum_{e != top} v_e E_e`
      (published contrast).
    - "sum", other levels: `F = x + sum_e w_e D'_e h_e`.
    - "mixture": `F2_e = x + D'_e h_e + beta (E_e - mean_{e' != e} E_e')`, beta learned; without
      `contrastive_head`, the term with beta is absent.

    By default, all experts run. With `active_experts`, only those with the greatest weights do, as
    in arXiv 1701.06538, and the formulas apply to them alone: their weights are normalized among
    themselves (arXiv 2401.04088), and the contrast is between them. The router of a single active
    expert would have no gradient, because the normalized weight is always 1. Its output is
    therefore multiplied by `w / stop_gradient(w)`, which is 1, so that the router has the gradient
    of a factor w (arXiv 2101.03961, equation 2), relative to w.

    Args:
        num_parallel: number of parallel levels that follow each autoregressive pass.
        contrastive_head: whether parallel levels use the contrast between experts (with "sum", only
            level 1 does); has no effect if there is only one expert.
        output_norm: whether the features are normalized, as in EAGLE-3.1.
        active_experts: number of experts that run for each vector; None for all of them.
    """

    def __init__(
        self,
        hidden: int,
        intermediate_size: int,
        num_experts: int,
        num_parallel: int,
        combine: Combine,
        contrastive_head: bool,
        norm_eps: float = 1e-6,
        output_norm: bool = False,
        active_experts: int | None = None,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.is_sparse = active_experts is not None
        self.num_active = num_experts if active_experts is None else active_experts
        self.combine = combine
        contrast = contrastive_head and self.num_active > 1 and num_parallel > 0
        self.published_contrast = contrast and combine == "sum"
        separate_levels = num_parallel - int(self.published_contrast)
        self.norm = RMSNorm(hidden, eps=norm_eps)
        self.router = nn.Linear(hidden, num_experts * (1 + self.published_contrast), bias=False)
        # If only some experts run, each has its own matrices, so that those of others are not read.
        self.gate_up: nn.Linear | nn.Parameter = (
            _stacked_linear(num_experts, hidden, 2 * intermediate_size)
            if self.is_sparse
            else nn.Linear(hidden, num_experts * 2 * intermediate_size, bias=False)
        )
        self.down = _stacked(num_experts, intermediate_size, hidden)
        self.level_down = (
            _stacked(separate_levels, num_experts, intermediate_size, hidden)
            if separate_levels
            else None
        )
        self.beta = (
            nn.Parameter(torch.zeros(separate_levels))
            if contrast and not self.published_contrast
            else None
        )
        self.output_norm = RMSNorm(hidden, eps=norm_eps) if output_norm else None

    def forward(self, trunk: Float[Tensor, "*batch hidden"]) -> ExpertsOutput:
        """Return the features and weights of all levels for each trunk vector."""
        normed = self.norm(trunk)
        if self.num_experts == 1 and self.level_down is None and not torch.is_grad_enabled():
            return self._of_one(trunk, normed)
        scores = self.router(normed)
        gate = scores[..., : self.num_experts].softmax(dim=-1)
        weights = gate
        chosen: Tensor | None = None
        if self.is_sparse:
            chosen = gate.topk(self.num_active, dim=-1).indices
            outputs, separate = self._of_chosen(normed, gate, chosen)
            scores = _picked(scores, chosen, self.num_experts)
            weights = scores[..., : self.num_active].softmax(dim=-1)
        else:
            inner = self._inner(normed)
            outputs = expert_products(inner, self.down)
            separate = self._separate_levels(inner, outputs)
        combined = self._mixture if self.combine == "mixture" else self._sum
        features, log_weights = combined(trunk, outputs, separate, scores, weights)
        if self.output_norm is not None:
            features = self.output_norm(features)
        return ExpertsOutput(features, log_weights, gate, chosen=chosen)

    def _of_one(self, trunk: Tensor, normed: Tensor) -> ExpertsOutput:
        """Return the features of a single expert, whose weight is 1, without a router."""
        features = trunk.unsqueeze(-2) + expert_products(self._inner(normed), self.down)
        if self.output_norm is not None:
            features = self.output_norm(features)
        one = torch.ones_like(trunk[..., :1])
        return ExpertsOutput(features.unsqueeze(-3), torch.zeros_like(one), one)

    @property
    def gate_up_rows(self) -> Float[Tensor, "experts 2 width hidden"]:
        """The experts' first matrices, gate before up, as a view of the parameter."""
        if isinstance(self.gate_up, nn.Linear):
            return self.gate_up.weight.unflatten(0, (self.num_experts, 2, -1))
        return self.gate_up.mT.unflatten(1, (2, -1))

    def _of_chosen(self, normed: Tensor, gate: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of the active experts, and those of levels with own projections."""
        assert isinstance(self.gate_up, Tensor)
        slots = ExpertSlots(chosen.flatten(), self.num_experts)
        rows = normed.unsqueeze(-2).expand(*chosen.shape, -1).flatten(0, -2)
        gated, up = slots.multiply(rows, self.gate_up).chunk(2, dim=-1)
        inner = silu(gated) * up
        if self.num_active == 1 and torch.is_grad_enabled():
            weight = gate.gather(-1, chosen).reshape(-1, 1)
            inner = inner * (weight / weight.detach())
        outputs = slots.multiply(inner, self.down).unflatten(0, chosen.shape)
        downs = () if self.level_down is None else self.level_down.unbind()
        levels = [slots.multiply(inner, down).unflatten(0, chosen.shape) for down in downs]
        none = outputs.new_zeros((*outputs.shape[:-2], 0, *outputs.shape[-2:]))
        return outputs, torch.stack(levels, dim=-3) if levels else none

    def _inner(self, normed: Tensor) -> Tensor:
        assert isinstance(self.gate_up, nn.Module)
        gate, up = self.gate_up(normed).unflatten(-1, (self.num_experts, 2, -1)).unbind(-2)
        return silu(gate) * up

    def _separate_levels(self, inner: Tensor, outputs: Tensor) -> Tensor:
        """Return `D'_e h_e`: the experts' outputs for the levels with separate down-projections."""
        if self.level_down is None:
            return outputs.new_zeros((*outputs.shape[:-2], 0, *outputs.shape[-2:]))
        return expert_products(inner, self.level_down)

    def _sum(
        self, trunk: Tensor, outputs: Tensor, separate: Tensor, scores: Tensor, gate: Tensor
    ) -> tuple[Tensor, Tensor]:
        levels = [torch.einsum("...e,...eh->...h", gate, outputs)]
        if self.published_contrast:
            levels.append(_top_against_rest(scores[..., self.num_active :].softmax(-1), outputs))
        levels += torch.einsum("...e,...peh->...ph", gate, separate).unbind(-2)
        features = trunk.unsqueeze(-2) + torch.stack(levels, dim=-2)
        return features.unsqueeze(-2), torch.zeros_like(scores[..., :1])

    def _mixture(
        self, trunk: Tensor, outputs: Tensor, separate: Tensor, scores: Tensor, gate: Tensor
    ) -> tuple[Tensor, Tensor]:
        if self.beta is not None:
            others = (outputs.sum(-2, keepdim=True) - outputs) / (self.num_active - 1)
            separate = separate + self.beta[:, None, None] * (outputs - others).unsqueeze(-3)
        stacked = torch.cat((outputs.unsqueeze(-3), separate), dim=-3)
        features = trunk[..., None, None, :] + stacked
        return features, scores.log_softmax(dim=-1)


def expert_products(
    inner: Float[Tensor, "*batch experts width"], stack: Tensor | nn.Module
) -> Tensor:
    """Return the product of each expert's inner activation with its matrix, for each level.

    Args:
        stack: matrices, of shape [experts, width, hidden] or [levels, experts, width, hidden]; or a
            module that multiplies by them.

    Returns:
        Products, of shape [*batch, experts, hidden] or [*batch, levels, experts, hidden].
    """
    if isinstance(stack, nn.Module):
        products: Tensor = stack(inner)
        return products
    has_levels = stack.dim() == 4
    equation = "...ew,pewh->...peh" if has_levels else "...ew,ewh->...eh"
    return torch.einsum(equation, inner, stack)


def mean_over_components(
    features: Float[Tensor, "*batch components hidden"],
    log_weights: Float[Tensor, "*batch components"],
) -> Float[Tensor, "*batch hidden"]:
    """Return `sum_e w_e F_e`."""
    if features.shape[-2] == 1:
        return features[..., 0, :]
    return torch.einsum("...c,...ch->...h", log_weights.exp(), features)


def _top_against_rest(weights: Tensor, outputs: Tensor) -> Tensor:
    """Return `v_top E_top - sum_{e != top} v_e E_e`."""
    # Exactly one expert is the top one, even if several experts share the largest weight.
    top = torch.zeros_like(weights, dtype=torch.bool).scatter_(
        -1, weights.argmax(dim=-1, keepdim=True), True
    )
    return torch.einsum("...e,...eh->...h", torch.where(top, weights, -weights), outputs)


def _picked(scores: Tensor, chosen: Tensor, num_experts: int) -> Tensor:
    """Return the scores of the active experts, for each group of as many scores as experts."""
    groups = scores.split(num_experts, dim=-1)
    return torch.cat([group.gather(-1, chosen) for group in groups], dim=-1)


def _stacked_linear(count: int, inner: int, outer: int) -> nn.Parameter:
    """Return a stack of random matrices, with the distribution that `nn.Linear` starts with."""
    return nn.Parameter(torch.empty(count, inner, outer).uniform_(-1, 1) * inner**-0.5)


def _stacked(*shape: int) -> nn.Parameter:
    """Return a stack of random matrices whose variance keeps activations at unit scale."""
    return nn.Parameter(torch.randn(shape) * shape[-2] ** -0.5)


def joint_log_probs(
    logits: Float[Tensor, "*batch components vocab"],
    log_weights: Float[Tensor, "*batch components"],
) -> Float[Tensor, "*batch components vocab"]:
    """Return `log(w_e * p_e(t))` in float32 for every component e and token t.

    `logsumexp` over components gives the mixture's distribution. Normalizing over components gives
    the posterior distribution over components for each token. With a single component of weight 1,
    the result is an ordinary log-softmax.
    """
    return logits.float().log_softmax(dim=-1) + log_weights.float().unsqueeze(-1)


def posterior_log_weights(
    joint_at_token: Float[Tensor, "*batch components"],
    log_prior: Float[Tensor, "*batch components"],
) -> Float[Tensor, "*batch components"]:
    """Return the log-weights of the components given the token t: `log(w_e p_e(t))`, normalized.

    The prior is returned unchanged if every component gives the token probability zero. There,
    only the prior gets a gradient.

    Args:
        joint_at_token: `log(w_e * p_e(t))` for the known token t, from `joint_log_probs`.
    """
    impossible = joint_at_token.isneginf().all(dim=-1, keepdim=True)
    # The gradient of `logsumexp` is NaN where all its inputs are -inf.
    possible = torch.where(impossible, 0.0, joint_at_token)
    posterior = possible - possible.logsumexp(dim=-1, keepdim=True)
    return torch.where(impossible, log_prior.float(), posterior)
