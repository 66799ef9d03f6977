"""Products with the matrices of chosen experts are the same in all ways of computing them."""

import pytest
import torch

from moa.expert_slots import ExpertSlots

NUM_EXPERTS, INNER, OUTER = 8, 10, 6


@pytest.mark.parametrize("num_slots", [0, 1, 5, 40])
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


def test_slots_are_grouped_where_shapes_may_depend_on_them() -> None:
    assert ExpertSlots(torch.tensor([2]), NUM_EXPERTS).way == "grouped"


def test_shapes_are_known_without_values() -> None:
    slots = ExpertSlots(torch.zeros(11, dtype=torch.long, device="meta"), NUM_EXPERTS)
    rows = torch.empty(11, INNER, device="meta")
    stack = torch.empty(NUM_EXPERTS, INNER, OUTER, device="meta")
    assert slots.multiply(rows, stack).shape == (11, OUTER)
