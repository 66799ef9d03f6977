"""Vectors with 8 bits for each value."""

import pytest
import torch

from jakiro.target.int8_rows import GROUP, quantized_rows, restored_rows


@pytest.mark.parametrize("width", [GROUP - 1, GROUP + 1])
def test_values_are_restored_to_within_half_a_level(width: int) -> None:
    rows = torch.randn(5, width, generator=torch.Generator().manual_seed(width)) * 3
    found = restored_rows(quantized_rows(rows), width)
    largest = rows.abs().amax(dim=1, keepdim=True)
    assert found.shape == rows.shape
    assert ((found - rows).abs() <= largest * (0.51 / 127)).all()


def test_the_largest_value_of_a_group_does_not_affect_other_groups() -> None:
    rows = torch.full((1, 2 * GROUP), 0.01)
    rows[0, 0] = 1000.0
    assert restored_rows(quantized_rows(rows), 2 * GROUP)[0, GROUP:].allclose(
        torch.tensor(0.01), rtol=0.01
    )


def test_zeros_and_values_that_are_not_numbers_stay_finite() -> None:
    rows = torch.tensor([[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0], [1e-12, 0.0]])
    found = restored_rows(quantized_rows(rows), 2)
    assert found.isfinite().all()
    assert found[0].tolist() == [0.0, 0.0]
    assert found[1].tolist() == pytest.approx([0.0, 1.0], abs=0.01)
