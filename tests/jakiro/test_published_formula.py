"""The feedback trunk with summed experts computes the published formulas (arXiv 2502.06282).

The reference below follows the formulas, number by number, in float64. It takes only the weights
from the package.
"""

import math
from collections.abc import Sequence

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.variants import FEEDBACK, PUBLISHED
from torch import Tensor

from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter
from moa.trunk import TrunkInputs

HEADS, KV_HEADS, DIM, HIDDEN, WIDTH, COUNT = 4, 2, 8, 32, 24, 6
BASE, EPS = 10_000.0, 1e-6

Vector = Tensor  # [hidden], float64


def rms_norm(vector: Vector, gain: Tensor) -> Vector:
    return vector / math.sqrt(sum(float(x) ** 2 for x in vector) / len(vector) + EPS) * gain


def rotated(head: Vector, position: int) -> Vector:
    """Return `head` with its pairs (i, i + half) rotated by position * base^(-2i / dim)."""
    result, half = head.clone(), len(head) // 2
    for i in range(half):
        angle = position * BASE ** (-2 * i / len(head))
        a, b = float(head[i]), float(head[i + half])
        result[i] = a * math.cos(angle) - b * math.sin(angle)
        result[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return result


def softmax(scores: Sequence[float]) -> list[float]:
    highest = max(scores)
    shares = [math.exp(score - highest) for score in scores]
    return [share / sum(shares) for share in shares]


def silu(vector: Vector) -> Vector:
    return torch.tensor([float(x) / (1 + math.exp(-float(x))) for x in vector]).double()


class Reference:
    """A decoder layer over `fc([embed(x_i); f_{i-1}])` whose feed-forward part is two experts."""

    def __init__(self, drafter: JakiroDrafter) -> None:
        self.weight = {name: part.double() for name, part in drafter.state_dict().items()}

    def trunk(self, tokens: Sequence[Vector], previous: Sequence[Vector]) -> list[Vector]:
        weight = self.weight
        join, bias = (
            weight["trunk.feature_input.join.weight"],
            weight["trunk.feature_input.join.bias"],
        )
        stream = [
            join @ torch.cat(self._normed(*pair)) + bias
            for pair in zip(tokens, previous, strict=True)
        ]
        gain = weight["trunk.self_attention.norm.weight"]
        project = weight["trunk.self_attention.project.weight"]
        output = weight["trunk.self_attention.output.weight"]
        heads = [(project @ rms_norm(vector, gain)).reshape(-1, DIM) for vector in stream]
        return [stream[i] + output @ self._mixed(heads, i) for i in range(len(stream))]

    def _normed(self, token: Vector, feature: Vector) -> tuple[Vector, Vector]:
        if "trunk.feature_input.token_norm.weight" not in self.weight:
            return token, feature
        gains = (
            self.weight[f"trunk.feature_input.{half}_norm.weight"] for half in ("token", "feature")
        )
        return rms_norm(token, next(gains)), rms_norm(feature, next(gains))

    def _mixed(self, heads: Sequence[Tensor], i: int) -> Vector:
        """Return the attention of position i to 0..i; several query heads share a key head."""
        mixed = []
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            query = rotated(heads[i][head], i)
            keys = [rotated(heads[j][HEADS + shared], j) for j in range(i + 1)]
            values = [heads[j][HEADS + KV_HEADS + shared] for j in range(i + 1)]
            shares = softmax([float(query @ key) / math.sqrt(DIM) for key in keys])
            mixed.append(sum(s * value for s, value in zip(shares, values, strict=True)))
        return torch.cat(mixed)

    def experts(self, x: Vector) -> tuple[Vector, Vector]:
        """Return F1 = x + sum_e w_e E_e(n) and F2 = x + v_top E_top(n) - v_other E_other(n)."""
        normed = rms_norm(x, self.weight["experts.norm.weight"])
        g = [float(score) for score in self.weight["experts.router.weight"] @ normed]
        w, v = softmax(g[:2]), softmax(g[2:])
        first, second = self._expert(normed, 0), self._expert(normed, 1)
        top, other = (
            ((v[0], first), (v[1], second)) if v[0] > v[1] else ((v[1], second), (v[0], first))
        )
        return x + w[0] * first + w[1] * second, x + top[0] * top[1] - other[0] * other[1]

    def _expert(self, normed: Vector, e: int) -> Vector:
        inner = self.weight["experts.gate_up.weight"] @ normed
        inner = inner[2 * WIDTH * e : 2 * WIDTH * (e + 1)]
        return (silu(inner[:WIDTH]) * inner[WIDTH:]) @ self.weight["experts.down"][e]


def _published(trunk: dict[str, object], num_experts: int = 2) -> JakiroDrafter:
    settings = tiny_settings(num_experts, combine="sum", parallel_levels=1, trunk=trunk)
    drafter = tiny_drafter(TargetAdapter(tiny_llama()), settings)
    with torch.no_grad():  # norm gains start at 1, which would hide a missing gain
        for name, part in drafter.named_parameters():
            if "norm" in name:
                part.uniform_(0.5, 1.5)
    return drafter.double()


@pytest.mark.parametrize("trunk", [PUBLISHED, FEEDBACK], ids=["published", "input norms"])
@torch.no_grad()
def test_both_features_equal_the_closed_form(trunk: dict[str, object]) -> None:
    drafter = _published(trunk)
    tokens, features = torch.randn(2, COUNT, HIDDEN, dtype=torch.float64)
    previous = torch.cat((torch.zeros(1, HIDDEN), features[:-1])).double()
    mask = torch.ones(COUNT, COUNT, dtype=torch.bool).tril()[None, None]
    output = drafter(tokens[None], torch.arange(COUNT)[None], mask, TrunkInputs(previous[None]))
    reference = Reference(drafter)
    expected = [reference.experts(x) for x in reference.trunk(list(tokens), list(previous))]
    for i, (first, second) in enumerate(expected):
        # The package rotates heads by angles in float32.
        assert (output.features[0, i, 0, 0] - first).abs().max() < 1e-6
        assert (output.features[0, i, 1, 0] - second).abs().max() < 1e-6
    assert output.log_weights.eq(0).all()


@torch.no_grad()
def test_the_second_pass_reads_the_feature_that_the_first_pass_predicted() -> None:
    drafter = _published(PUBLISHED)
    reference = Reference(drafter)
    tokens, features = torch.randn(2, 3, HIDDEN, dtype=torch.float64)
    known = [torch.zeros(HIDDEN).double(), features[0]]
    first, _ = reference.experts(reference.trunk(list(tokens[:2]), known)[1])
    second, _ = reference.experts(reference.trunk(list(tokens), [*known, first])[2])
    mask = torch.ones(2, 2, dtype=torch.bool).tril()[None, None]
    first_pass = drafter(
        tokens[None, :2], torch.arange(2)[None], mask, TrunkInputs(torch.stack(known)[None])
    )
    previous = torch.stack([*known, first_pass.mean_feature[0, 1]])[None]
    mask = torch.ones(3, 3, dtype=torch.bool).tril()[None, None]
    second_pass = drafter(tokens[None], torch.arange(3)[None], mask, TrunkInputs(previous))
    assert (second_pass.features[0, 2, 0, 0] - second).abs().max() < 1e-6


@pytest.mark.parametrize("num_experts", [2, 4])
@torch.no_grad()
def test_the_contrast_adds_the_top_expert_and_subtracts_all_others(num_experts: int) -> None:
    experts = _published(PUBLISHED, num_experts).experts
    x = torch.randn(20, HIDDEN, dtype=torch.float64)
    weight = {name: part.double() for name, part in experts.state_dict().items()}
    tops = set()
    for vector, features in zip(x, experts(x).features, strict=True):
        normed = rms_norm(vector, weight["norm.weight"])
        v = softmax([float(score) for score in weight["router.weight"][num_experts:] @ normed])
        inner = (weight["gate_up.weight"] @ normed).reshape(num_experts, 2, WIDTH)
        expected, top = vector.clone(), v.index(max(v))
        for e in range(num_experts):
            output = (silu(inner[e, 0]) * inner[e, 1]) @ weight["down"][e]
            expected += (v[e] if e == top else -v[e]) * output
        tops.add(top)
        assert (features[1, 0] - expected).abs().max() < 1e-6
    assert len(tops) > 1


@torch.no_grad()
def test_only_one_expert_is_on_top_when_several_have_the_same_weight() -> None:
    experts = _published(PUBLISHED).experts
    experts.router.weight.zero_()  # all scores are equal
    x = torch.randn(3, HIDDEN, dtype=torch.float64)
    inner = experts._inner(experts.norm(x))
    outputs = torch.einsum("...ew,ewh->...eh", inner, experts.down)
    expected = x + (outputs[:, 0] - outputs[:, 1]) / 2
    torch.testing.assert_close(experts(x).features[:, 1, 0], expected)
