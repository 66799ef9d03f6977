"""Rows are multiplied one by one only where their products would otherwise differ."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from jakiro.target.single_rows import RowByRow, depends_on_rows, with_single_rows


class _OtherRows(nn.Linear):
    """A product that is different if there are several rows."""

    def forward(self, x: Tensor) -> Tensor:
        product = super().forward(x)
        return product * 1.01 if x.numel() > x.shape[-1] else product


def test_rows_are_multiplied_one_by_one_only_where_they_must(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few, many = nn.Linear(8, 8).bfloat16(), nn.Linear(1600, 16).bfloat16()
    found = with_single_rows(nn.Sequential(few, many))
    assert [isinstance(own, RowByRow) for own in found.children()] == [
        depends_on_rows(few),
        depends_on_rows(many),
    ]
    uneven = _OtherRows(8, 8)
    assert depends_on_rows(uneven)
    rows = torch.randn(2, 3, 8)
    single = RowByRow(uneven)
    monkeypatch.setattr(_OtherRows, "forward", None)  # nothing is multiplied by several rows
    each = torch.stack(
        [torch.stack([linear(row, uneven.weight, uneven.bias) for row in own]) for own in rows]
    )
    torch.testing.assert_close(single(rows), each)
    assert single(rows[:0]).shape == (0, 3, 8)
