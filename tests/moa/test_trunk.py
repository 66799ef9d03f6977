"""Further layers equal their parts, and store the same keys and values as in a whole pass."""

from functools import partial

import torch

from moa.attention import KV, SelfAttention
from moa.trunk import FurtherLayer, Trunk, TrunkInputs

POSITIONS = torch.arange(4)[None]
CAUSAL = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()


class _Kept:
    """A store that keeps what it is given."""

    def __call__(self, kv: KV, /) -> KV:
        self.kv = kv
        return kv


def test_a_layer_is_a_network_followed_by_attention() -> None:
    torch.manual_seed(0)
    layer = FurtherLayer(8, 5, 1e-6, partial(SelfAttention, 8, 2, 1, 4, 100.0)).double()
    stream = torch.randn(1, 4, 8, dtype=torch.double)
    between, kept = layer.feed_forward(stream), _Kept()
    got = layer(stream, POSITIONS, CAUSAL, kept)
    assert torch.equal(got, layer.self_attention(between, POSITIONS, CAUSAL))
    for part, expected in zip(layer.kv(stream, POSITIONS), kept.kv, strict=True):
        torch.testing.assert_close(part, expected)


def test_stored_tokens_are_those_of_a_pass() -> None:
    torch.manual_seed(0)
    trunk = Trunk(8, 2, 1, 4, 100.0, attends_memory=False, num_layers=3, layer_width=5).double()
    embeddings = torch.randn(1, 4, 8, dtype=torch.double)
    passed, stored = (_Kept(), _Kept(), _Kept()), (_Kept(), _Kept(), _Kept())
    trunk(embeddings, POSITIONS, CAUSAL, TrunkInputs(), passed)
    trunk.store_tokens(embeddings, POSITIONS, CAUSAL, TrunkInputs(), stored)
    assert len(trunk.kv_shapes) == 3
    for one, other in zip(passed, stored, strict=True):
        for part, expected in zip(other.kv, one.kv, strict=True):
            torch.testing.assert_close(part, expected)
