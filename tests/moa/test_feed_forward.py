"""The feed-forward network equals its equations, and follows self-attention in a trunk."""

import torch
from torch.nn.functional import silu

from moa.feed_forward import FeedForward
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
    inputs = TrunkInputs(memory=kv, mask=mask)
    stream = trunk.feed_forward(trunk.self_attention(embeddings, positions, mask))
    expected = trunk.cross_attention(stream, positions, kv, mask)
    got = trunk(embeddings, positions, mask, inputs)
    assert torch.equal(got, expected)
    assert not torch.equal(got, without(embeddings, positions, mask, inputs))
