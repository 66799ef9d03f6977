"""Attention to verified rows alone, computed with an attention that cannot leave out rows."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from inference.vllm_plugin.attention import CachedAttend, VerifiedAttend
from moa.attention import KV, attend_masked

TOKENS, HEADS, KV_HEADS, DIM = 12, 4, 2, 8
VERIFIED = torch.arange(TOKENS) < 8
CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[None, None]


class CausalRows(nn.Module):
    """Attention of one request as vLLM has it: flat rows, each of which sees those before it."""

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        heads = (rows.unflatten(-1, (-1, DIM)).transpose(0, 1) for rows in (queries, keys, values))
        mixed = scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return mixed.transpose(0, 1).flatten(1)


def _cached() -> CachedAttend:
    return CachedAttend(CausalRows(), DIM)


def _inputs(scale: float, dtype: torch.dtype) -> tuple[Tensor, KV]:
    generator = torch.Generator().manual_seed(0)
    queries = scale * torch.randn(1, HEADS, TOKENS, DIM, generator=generator)
    keys, values = torch.randn(2, 1, KV_HEADS, TOKENS, DIM, generator=generator)
    return queries.to(dtype), KV(keys.to(dtype), values.to(dtype))


def test_cached_attention_is_causal_attention() -> None:
    queries, kv = _inputs(1.0, torch.float32)
    got = _cached()(queries, kv, CAUSAL)
    torch.testing.assert_close(got, attend_masked(queries, kv, CAUSAL))


@pytest.mark.parametrize(
    ("scale", "dtype", "tolerance"),
    [
        (1.0, torch.float64, 1e-12),
        (20.0, torch.float64, 1e-10),
        (1.0, torch.float32, 1e-5),
        (1.0, torch.bfloat16, 3e-2),
    ],
)
def test_rows_of_drafted_tokens_are_left_out_exactly(
    scale: float, dtype: torch.dtype, tolerance: float
) -> None:
    queries, kv = _inputs(scale, dtype)
    got = _verified_alone(queries, kv)
    assert float((got.double() - _expected(queries, kv)).abs().max()) < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1e-2), (torch.bfloat16, 6e-2)])
def test_drafted_rows_are_left_out_if_all_scores_of_verified_rows_are_low(
    dtype: torch.dtype, tolerance: float
) -> None:
    queries, kv = _inputs(1.0, torch.float32)
    # The common part of queries and keys lowers each score of a verified row by 40.
    queries[..., 0], kv.keys[..., 0] = 10.0, -4.0 * DIM**0.5
    queries, kv = queries.to(dtype), KV(*(part.to(dtype) for part in kv))
    got = _verified_alone(queries, kv)
    assert float((got.double() - _expected(queries, kv)).abs().max()) < tolerance


def _verified_alone(queries: Tensor, kv: KV) -> Tensor:
    """Return what the plug-in mixes; drafted rows have the key of the last verified one."""
    last = int(VERIFIED.nonzero().max())
    keys = torch.where(VERIFIED[:, None], kv.keys, kv.keys[:, :, last : last + 1])
    return VerifiedAttend(_cached(), _cached())(
        queries, KV(keys, kv.values), VERIFIED[None, None, None]
    )


def _expected(queries: Tensor, kv: KV) -> Tensor:
    exact = KV(*(part.double() for part in kv))
    return attend_masked(queries.double(), exact, CAUSAL & VERIFIED)


def test_rows_that_see_no_verified_token_are_finite() -> None:
    queries, kv = _inputs(1.0, torch.float32)
    none = torch.zeros(1, 1, 1, TOKENS, dtype=torch.bool)
    assert VerifiedAttend(_cached(), _cached())(queries, kv, none).isfinite().all()
