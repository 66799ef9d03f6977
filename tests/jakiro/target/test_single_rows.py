"""Rows are multiplied one by one only where their products would otherwise differ."""

import pytest
import torch
from torch import Tensor, nn

from jakiro.target.single_rows import ROWS, RowGroups, depends_on_rows, with_row_groups


class _OtherRows(nn.Linear):
    """A product that is different if there are several rows."""

    def forward(self, x: Tensor) -> Tensor:
        product = super().forward(x)
        return product * 1.01 if x.numel() > x.shape[-1] else product


def test_rows_are_multiplied_together_only_where_this_changes_nothing() -> None:
    few, many, uneven = nn.Linear(8, 8).bfloat16(), nn.Linear(1600, 16).bfloat16(), _OtherRows(8, 8)
    assert depends_on_rows(uneven)
    sizes = dict[object, int]()
    found = list(with_row_groups(nn.Sequential(few, many), sizes).children())
    for layer, own in zip(found, (few, many), strict=True):
        assert isinstance(layer, RowGroups)
        assert layer.size == (1 if depends_on_rows(own) else max(ROWS))
    assert len(sizes) == 2
    with_row_groups(nn.Linear(8, 8).bfloat16(), sizes)
    assert len(sizes) == 2  # a shape is compared once


@pytest.mark.parametrize("size", [1, 4, 64])
def test_groups_of_rows_have_the_products_of_the_layer(size: int) -> None:
    layer, rows = nn.Linear(8, 6), torch.randn(2, 3, 8)
    groups = RowGroups(layer, size)
    torch.testing.assert_close(groups(rows), layer(rows))
    assert groups(rows[:, :0]).shape == (2, 0, 6)
    assert groups(rows[0, 0]).shape == (6,)
