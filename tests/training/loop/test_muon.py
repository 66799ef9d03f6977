"""Muon's updates are orthogonal, and equal torch's up to rounding."""

from collections import defaultdict

import pytest
import torch
from torch import nn

from training.loop import muon
from training.loop.muon import orthogonalize, take_muon_step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 32, 8), (2, 8, 32)])
def test_orthogonalized_matrices_have_singular_values_near_one(
    shape: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muon, "native_dtype", lambda _device: dtype)
    matrices = 100 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(matrices, num_steps=8))
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_orthogonalized_matrices_are_about_the_same_in_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    matrices = torch.randn(4, 48, 32, generator=torch.Generator().manual_seed(0))
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(muon, "native_dtype", lambda _device, dtype=dtype: dtype)
        results.append(orthogonalize(matrices))
    full, half = results
    assert half.dtype == torch.float32
    assert 0 < (half - full).norm() < 0.02 * full.norm()


def test_muon_agrees_with_torchs_up_to_bfloat16() -> None:
    start = torch.randn(2, 16, 12, generator=torch.Generator().manual_seed(0))
    ours = [nn.Parameter(matrix.clone()) for matrix in start]
    theirs = [nn.Parameter(matrix.clone()) for matrix in start]
    reference, state = torch.optim.Muon(theirs, lr=0.1, weight_decay=0.0), defaultdict(dict)
    for step in range(3):
        gradients = torch.randn(2, 16, 12, generator=torch.Generator().manual_seed(step + 1))
        for parameter, gradient in zip([*ours, *theirs], [*gradients, *gradients], strict=True):
            parameter.grad = gradient.clone()
        reference.step()
        take_muon_step(ours, state, lr=0.1)
    for got, expected in zip(ours, theirs, strict=True):
        assert (got - expected).abs().max() < 0.01
