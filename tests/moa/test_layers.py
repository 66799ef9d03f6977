"""Norm and feed-forward network equal their equations; the network follows self-attention."""

import pytest
import torch
from torch.nn.functional import silu

from moa.layers import ExpertSlots, FeedForward, RMSNorm
from moa.trunk import Trunk, TrunkInputs


def test_the_network_equals_its_equations() -> None:
    torch.manual_seed(0)
    network = FeedForward(6, 5, norm_eps=1e-3).double()
    with torch.no_grad():
        network.norm.weight.uniform_(0.5, 1.5)
    x = torch.randn(2, 3, 6, dtype=torch.double)
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * network.norm.weight
    gate, up = (normed @ rows.T for rows in network.gate_up.weight.split(5))
    expected = x + (silu(gate) * up) @ network.down.weight.T
    assert torch.allclose(network(x), expected, atol=1e-12)


def test_a_trunk_has_the_network_between_its_two_kinds_of_attention() -> None:
    torch.manual_seed(0)
    trunk = Trunk(8, 2, 1, 4, 100.0, mlp_width=5).double()
    without = Trunk(8, 2, 1, 4, 100.0).double()
    shared = {k: v for k, v in trunk.state_dict().items() if not k.startswith("feed_forward")}
    without.load_state_dict(shared)
    embeddings, memory = torch.randn(2, 1, 3, 8, dtype=torch.double)
    positions, mask = torch.arange(3)[None], torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    assert trunk.feed_forward is not None
    assert trunk.cross_attention is not None
    kv = trunk.cross_attention.kv(memory, positions)
    inputs = TrunkInputs(memory=(kv,), mask=mask)
    stream = trunk.feed_forward(trunk.self_attention(embeddings, positions, mask))
    expected = trunk.cross_attention(stream, positions, kv, mask)
    got = trunk(embeddings, positions, mask, inputs)
    assert torch.equal(got, expected)
    assert not torch.equal(got, without(embeddings, positions, mask, inputs))


NUM_EXPERTS, INNER, OUTER = 8, 10, 6


@pytest.mark.parametrize("num_slots", [0, 5, 40])
@pytest.mark.parametrize("way", ["grouped", "gathered", "all"])
def test_each_row_is_multiplied_with_the_matrix_of_its_expert(way: str, num_slots: int) -> None:
    torch.manual_seed(0)
    rows = torch.randn(num_slots, INNER, dtype=torch.float64, requires_grad=True)
    stack = torch.randn(NUM_EXPERTS, INNER, OUTER, dtype=torch.float64, requires_grad=True)
    chosen = torch.randint(0, NUM_EXPERTS - 1, (num_slots,))
    expected = torch.stack(
        [rows[slot] @ stack[expert] for slot, expert in enumerate(chosen.tolist())] or [rows[:0]]
    ).reshape(num_slots, OUTER)
    got = ExpertSlots(chosen, NUM_EXPERTS, way).multiply(rows, stack)
    torch.testing.assert_close(got, expected)
    if num_slots:
        parts = (rows, stack)
        slopes = [torch.autograd.grad(found.square().sum(), parts) for found in (got, expected)]
        torch.testing.assert_close(slopes[0], slopes[1])
        assert not slopes[0][1][NUM_EXPERTS - 1].any()  # the last expert has no slot


def test_shapes_are_known_without_values() -> None:
    slots = ExpertSlots(torch.zeros(11, dtype=torch.long, device="meta"), NUM_EXPERTS)
    rows = torch.empty(11, INNER, device="meta")
    stack = torch.empty(NUM_EXPERTS, INNER, OUTER, device="meta")
    assert slots.multiply(rows, stack).shape == (11, OUTER)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_norm_without_gradients_equals_that_of_torch(dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(0)
    norm = RMSNorm(48, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x = (scale * torch.randn(3, 5, 48)).to(dtype)
    x[0] += 100 * scale  # whose mean is far from 0
    with torch.no_grad():
        got = norm(x)
    torch.testing.assert_close(got, norm(x).detach())
