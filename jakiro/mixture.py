"""Arithmetic of mixtures of softmaxes: one law from several components, and its posterior."""

import torch
from jaxtyping import Float
from torch import Tensor


def joint_log_probs(
    logits: Float[Tensor, "*batch components vocab"],
    log_weights: Float[Tensor, "*batch components"],
) -> Float[Tensor, "*batch components vocab"]:
    """Return `log(w_e * p_e(t))` in float32 for every component e and token t.

    Summing over components (`logsumexp`) gives the mixture's law; normalising over them gives each
    token's posterior. With one component of weight 1 this is a plain log-softmax.
    """
    return logits.float().log_softmax(dim=-1) + log_weights.float().unsqueeze(-1)


def posterior_log_weights(
    joint_at_token: Float[Tensor, "*batch components"],
    log_prior: Float[Tensor, "*batch components"],
) -> Float[Tensor, "*batch components"]:
    """Return the components' log-weights after a token was chosen, `w_e(t) ~ w_e p_e(t)`.

    Where no component gives the token any probability the prior is kept.
    """
    total = joint_at_token.logsumexp(dim=-1, keepdim=True)
    return torch.where(total.isneginf(), log_prior.float(), joint_at_token - total)
