"""Further layers and trigrams equal their parts, and tokens are stored as in a whole pass."""

from functools import partial

import torch
from torch.nn.functional import silu

from moa.attention import KV, SelfAttention
from moa.trunk import FurtherLayer, TrigramInput, Trunk, TrunkInputs

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


def _earlier(embeddings: torch.Tensor) -> torch.Tensor:
    """Return the embeddings of the two tokens before each token of one text."""
    nothing = torch.zeros_like(embeddings[:, :1])
    padded = torch.cat((nothing, nothing, embeddings), dim=1)
    return torch.stack((padded[:, 1:-1], padded[:, :-2]), dim=2)


def test_the_vector_of_three_tokens_equals_its_equation() -> None:
    torch.manual_seed(0)
    trigram = TrigramInput(4, norm_eps=1e-3).double()
    embeddings = torch.randn(1, 5, 4, dtype=torch.double)
    got = trigram(embeddings, _earlier(embeddings))
    zeros = torch.zeros(4, dtype=torch.double)
    for index in range(5):
        own = [embeddings[0, index - back] if index >= back else zeros for back in range(3)]
        x = torch.cat(own)
        normed = x / (x.square().mean() + 1e-3).sqrt()
        expected = own[0] + trigram.down.weight @ silu(trigram.up.weight @ normed)
        assert torch.allclose(got[0, index], expected, atol=1e-12)


def test_a_trunk_reads_trigrams_in_place_of_tokens() -> None:
    torch.manual_seed(0)
    arguments = {"attends_memory": False, "reads_features": True}
    trunk = Trunk(8, 2, 1, 4, 100.0, **arguments, tokens="trigram").double()
    single = Trunk(8, 2, 1, 4, 100.0, **arguments).double()
    state = trunk.state_dict()
    single.load_state_dict({k: v for k, v in state.items() if not k.startswith("trigram")})
    embeddings, previous = torch.randn(2, 1, 3, 8, dtype=torch.double)
    positions, mask = torch.arange(3)[None], torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    earlier = _earlier(embeddings)
    assert trunk.trigram is not None
    encoded = trunk.trigram(embeddings, earlier)
    got = trunk(embeddings, positions, mask, TrunkInputs(previous, earlier=earlier))
    assert torch.equal(got, single(encoded, positions, mask, TrunkInputs(previous)))
    kv = trunk.kv(embeddings, positions, previous, earlier)
    for part, expected in zip(kv, single.kv(encoded, positions, previous), strict=True):
        assert torch.equal(part, expected)
