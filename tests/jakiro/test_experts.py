"""The mixture of experts equals its equations, computed expert by expert in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from jakiro.experts import MixtureOfExperts, joint_log_probs, posterior_log_weights

HIDDEN, WIDTH = 10, 6


def _experts(num_experts: int, **changes: Any) -> MixtureOfExperts:
    torch.manual_seed(3)
    settings = {"num_parallel": 2, "combine": "mixture", "contrastive_head": True, **changes}
    experts = MixtureOfExperts(HIDDEN, WIDTH, num_experts, **settings).double()
    torch.nn.init.uniform_(experts.norm.weight, 0.5, 1.5)
    if experts.beta is not None:
        experts.beta.data.copy_(torch.tensor([0.7, -0.4]))
    return experts


def _silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def _activations(weight: dict[str, Tensor], vector: Tensor, num_experts: int) -> list[Tensor]:
    normed = vector / (vector.square().mean() + 1e-6).sqrt() * weight["norm.weight"]
    both = (weight["gate_up.weight"] @ normed).reshape(num_experts, 2, WIDTH)
    return [_silu(gate) * up for gate, up in both]


@pytest.mark.parametrize("num_experts", [2, 4])
@torch.no_grad()
def test_parallel_levels_add_the_contrast_of_each_expert_with_the_mean_of_the_others(
    num_experts: int,
) -> None:
    experts = _experts(num_experts)
    weight = experts.state_dict()
    x = torch.randn(7, HIDDEN, dtype=torch.float64)
    for vector, features in zip(x, experts(x).features, strict=True):
        inner = _activations(weight, vector, num_experts)
        outputs = [h @ down for h, down in zip(inner, weight["down"], strict=True)]
        for e in range(num_experts):
            others = [outputs[other] for other in range(num_experts) if other != e]
            contrast = outputs[e] - sum(others, torch.zeros(HIDDEN)) / len(others)
            torch.testing.assert_close(features[0, e], vector + outputs[e])
            for level in (1, 2):
                own = inner[e] @ weight["level_down"][level - 1, e]
                beta = weight["beta"][level - 1]
                torch.testing.assert_close(features[level, e], vector + own + beta * contrast)


@pytest.mark.parametrize("are_scores_equal", [False, True])
@torch.no_grad()
def test_the_published_contrast_adds_one_expert_and_subtracts_all_others(
    are_scores_equal: bool,
) -> None:
    experts = _experts(4, num_parallel=1, combine="sum")
    if are_scores_equal:  # only one expert is on top then, too
        experts.router.weight.zero_()
    weight, tops = experts.state_dict(), set()
    x = torch.randn(20, HIDDEN, dtype=torch.float64)
    for vector, features in zip(x, experts(x).features, strict=True):
        inner = _activations(weight, vector, 4)
        normed = vector / (vector.square().mean() + 1e-6).sqrt() * weight["norm.weight"]
        v = (weight["router.weight"][4:] @ normed).softmax(-1)
        signs = -torch.ones(4).double()
        signs[v.argmax()] = 1
        tops.add(int(v.argmax()))
        outputs = torch.stack([h @ down for h, down in zip(inner, weight["down"], strict=True)])
        torch.testing.assert_close(features[1, 0], vector + (signs * v) @ outputs)
    assert are_scores_equal or len(tops) > 1


@torch.no_grad()
def test_the_weights_of_experts_are_the_routers_softmax() -> None:
    experts = _experts(3)
    weight = experts.state_dict()
    x = torch.randn(7, HIDDEN, dtype=torch.float64)
    for vector, log_weights in zip(x, experts(x).log_weights, strict=True):
        normed = vector / (vector.square().mean() + 1e-6).sqrt() * weight["norm.weight"]
        powers = (weight["router.weight"] @ normed).exp()
        torch.testing.assert_close(log_weights.exp(), powers / powers.sum())


@pytest.mark.parametrize("combine", ["mixture", "sum"])
@torch.no_grad()
def test_without_a_contrastive_head_parallel_levels_have_only_projections(combine: str) -> None:
    experts = _experts(2, combine=combine, contrastive_head=False)
    weight = experts.state_dict()
    assert experts.beta is None
    vector = torch.randn(HIDDEN, dtype=torch.float64)
    inner = _activations(weight, vector, 2)
    output = experts(vector)
    for level in (1, 2):
        pairs = zip(inner, weight["level_down"][level - 1], strict=True)
        own = torch.stack([h @ down for h, down in pairs])
        expected = own if combine == "mixture" else (output.gate @ own)[None]
        for features, added in zip(output.features[level], expected, strict=True):
            torch.testing.assert_close(features, vector + added)


@pytest.mark.parametrize("active", [1, 2])
@pytest.mark.parametrize("combine", ["mixture", "sum"])
@torch.no_grad()
def test_sparse_experts_equal_the_chosen_experts_alone(combine: str, active: int) -> None:
    experts = _experts(8, combine=combine, active_experts=active)
    weight = experts.state_dict()
    x = torch.randn(7, HIDDEN, dtype=torch.float64)
    output = experts(x)
    scores = experts.router(experts.norm(x))
    for row, vector in enumerate(x):
        chosen = scores[row, :8].argsort(descending=True)[:active]
        assert output.chosen is not None
        assert output.chosen[row].tolist() == chosen.tolist()
        alone = _experts(active, combine=combine)
        alone.load_state_dict(
            {
                "norm.weight": weight["norm.weight"],
                "router.weight": torch.cat(
                    [part[chosen] for part in weight["router.weight"].split(8)]
                ),
                "gate_up.weight": weight["gate_up"][chosen].mT.flatten(0, 1),
                "down": weight["down"][chosen],
                "level_down": weight["level_down"][:, chosen],
                **({"beta": weight["beta"]} if "beta" in weight else {}),
            }
        )
        expected = alone(vector)
        torch.testing.assert_close(output.features[row], expected.features)
        torch.testing.assert_close(output.log_weights[row], expected.log_weights)
    torch.testing.assert_close(output.gate, scores[:, :8].softmax(-1))


@pytest.mark.parametrize("combine", ["mixture", "sum"])
def test_the_router_of_one_active_expert_has_the_gradient_of_a_factor_of_its_output(
    combine: str,
) -> None:
    experts = _experts(8, combine=combine, active_experts=1)
    x = torch.randn(5, HIDDEN, dtype=torch.float64)
    with torch.no_grad():
        silent = experts(x).features
    output = experts(x)
    torch.testing.assert_close(output.features, silent)
    goal = torch.randn_like(silent)
    (slope,) = torch.autograd.grad((output.features * goal).sum(), experts.router.weight)
    weights = experts.router(experts.norm(x)).softmax(-1).amax(-1)
    added = ((silent - x[:, None, None]) * goal).sum((1, 2, 3)).detach()
    (expected,) = torch.autograd.grad((weights.log() * added).sum(), experts.router.weight)
    torch.testing.assert_close(slope, expected)


def test_an_impossible_token_keeps_the_prior_and_gives_finite_gradients() -> None:
    logits = torch.zeros(3, 2, 4)
    logits[1, :, 2] = -torch.inf  # token 2 is impossible for both components, ...
    logits[2, 0, 2] = -torch.inf  # ... and here for the first one
    logits.requires_grad_()
    prior = torch.tensor([[0.25, 0.75]]).log().repeat(3, 1).requires_grad_()
    posterior = posterior_log_weights(joint_log_probs(logits, prior)[:, :, 2], prior)
    torch.testing.assert_close(
        posterior.exp(), torch.tensor([[0.25, 0.75], [0.25, 0.75], [0.0, 1.0]])
    )
    (posterior.exp() * torch.arange(6).reshape(3, 2)).sum().backward()
    for values in (logits, prior):
        assert values.grad is not None
        assert values.grad.isfinite().all()
