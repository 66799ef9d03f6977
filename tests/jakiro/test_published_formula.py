"""The feedback trunk with a summed bank computes what was published (arXiv 2502.06282).

The reference below is written from the formulas, number by number in float64; of the package it
takes the weights and nothing else.
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
    """Turn the pairs (i, i + half) by position * base^(-2i / dim)."""
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
    """One decoder layer over `fc([embed(x_i); f_{i-1}])`, its feed-forward part a bank of two."""

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
        heads = [(project @ rms_norm(one, gain)).reshape(-1, DIM) for one in stream]
        return [stream[i] + output @ self._mixed(heads, i) for i in range(len(stream))]

    def _normed(self, token: Vector, feature: Vector) -> tuple[Vector, Vector]:
        if "trunk.feature_input.token_norm.weight" not in self.weight:
            return token, feature
        gains = (
            self.weight[f"trunk.feature_input.{half}_norm.weight"] for half in ("token", "feature")
        )
        return rms_norm(token, next(gains)), rms_norm(feature, next(gains))

    def _mixed(self, heads: Sequence[Tensor], i: int) -> Vector:
        """Attention of position i over 0..i; several query heads share a key head."""
        mixed = []
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            query = rotated(heads[i][head], i)
            keys = [rotated(heads[j][HEADS + shared], j) for j in range(i + 1)]
            values = [heads[j][HEADS + KV_HEADS + shared] for j in range(i + 1)]
            shares = softmax([float(query @ key) / math.sqrt(DIM) for key in keys])
            mixed.append(sum(s * value for s, value in zip(shares, values, strict=True)))
        return torch.cat(mixed)

    def bank(self, x: Vector) -> tuple[Vector, Vector]:
        """F1 = x + sum_e w_e E_e(n); F2 = x + v_top E_top(n) - v_other E_other(n)."""
        normed = rms_norm(x, self.weight["experts.norm.weight"])
        g = [float(score) for score in self.weight["experts.router.weight"] @ normed]
        w, v = softmax(g[:2]), softmax(g[2:])
        first, second = self._expert(normed, 0), self._expert(normed, 1)
        top, other = (
            ((v[0], first), (v[1], second)) if v[0] > v[1] else ((v[1], second), (v[0], first))
        )
        return x + w[0] * first + w[1] * second, x + top[0] * top[1] - other[0] * other[1]

    def _expert(self, normed: Vector, e: int) -> Vector:
        inner = (self.weight["experts.gate_up.weight"] @ normed)[2 * WIDTH * e : 2 * WIDTH * (e + 1)]
        return (silu(inner[:WIDTH]) * inner[WIDTH:]) @ self.weight["experts.down"][e]


def _published(trunk: dict[str, object], num_experts: int = 2) -> JakiroDrafter:
    settings = tiny_settings(num_experts, combine="sum", parallel_levels=1, trunk=trunk)
    drafter = tiny_drafter(TargetAdapter(tiny_llama()), settings)
    with torch.no_grad():  # norm gains start at 1, where a forgotten one would not show
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
    expected = [reference.bank(x) for x in reference.trunk(list(tokens), list(previous))]
    for i, (first, second) in enumerate(expected):
        # The package turns heads by angles in float32.
        assert (output.features[0, i, 0, 0] - first).abs().max() < 1e-6
        assert (output.features[0, i, 1, 0] - second).abs().max() < 1e-6
    assert output.log_weights.eq(0).all()


@torch.no_grad()
def test_the_second_step_reads_the_feature_that_the_first_one_predicted() -> None:
    drafter = _published(PUBLISHED)
    reference = Reference(drafter)
    tokens, features = torch.randn(2, 3, HIDDEN, dtype=torch.float64)
    known = [torch.zeros(HIDDEN).double(), features[0]]
    first, _ = reference.bank(reference.trunk(list(tokens[:2]), known)[1])
    second, _ = reference.bank(reference.trunk(list(tokens), [*known, first])[2])
    mask = torch.ones(2, 2, dtype=torch.bool).tril()[None, None]
    one = drafter(
        tokens[None, :2], torch.arange(2)[None], mask, TrunkInputs(torch.stack(known)[None])
    )
    previous = torch.stack([*known, one.expected[0, 1]])[None]
    mask = torch.ones(3, 3, dtype=torch.bool).tril()[None, None]
    two = drafter(tokens[None], torch.arange(3)[None], mask, TrunkInputs(previous))
    assert (two.features[0, 2, 0, 0] - second).abs().max() < 1e-6


@pytest.mark.parametrize("num_experts", [2, 4])
@torch.no_grad()
def test_the_contrast_adds_the_top_expert_and_takes_all_others_away(num_experts: int) -> None:
    bank = _published(PUBLISHED, num_experts).experts
    x = torch.randn(20, HIDDEN, dtype=torch.float64)
    weight = {name: part.double() for name, part in bank.state_dict().items()}
    tops = set()
    for vector, features in zip(x, bank(x).features, strict=True):
        normed = rms_norm(vector, weight["norm.weight"])
        v = softmax([float(one) for one in weight["router.weight"][num_experts:] @ normed])
        inner = (weight["gate_up.weight"] @ normed).reshape(num_experts, 2, WIDTH)
        expected, top = vector.clone(), v.index(max(v))
        for e in range(num_experts):
            output = (silu(inner[e, 0]) * inner[e, 1]) @ weight["down"][e]
            expected += (v[e] if e == top else -v[e]) * output
        tops.add(top)
        assert (features[1, 0] - expected).abs().max() < 1e-6
    assert len(tops) > 1


@torch.no_grad()
def test_of_experts_that_weigh_the_same_only_one_is_on_top() -> None:
    bank = _published(PUBLISHED).experts
    bank.router.weight.zero_()  # all scores are equal
    x = torch.randn(3, HIDDEN, dtype=torch.float64)
    inner = bank._inner(bank.norm(x))
    outputs = torch.einsum("...ew,ewh->...eh", inner, bank.down)
    expected = x + (outputs[:, 0] - outputs[:, 1]) / 2
    torch.testing.assert_close(bank(x).features[:, 1, 0], expected)
