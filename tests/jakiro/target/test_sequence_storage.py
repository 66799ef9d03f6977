"""A batch keeps its storage while sequences join and leave."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from jakiro.target.sequence_storage import SequenceStorage


def _rows(*values: float, slots: int = 2) -> SequenceStorage:
    content = torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1).expand(2, -1, slots, 3)
    return SequenceStorage(content.clone(), dim=1)


def _first(rows: SequenceStorage) -> list[float]:
    return rows.live[0, :, 0, 0].tolist()


def test_sequences_that_join_take_the_rows_of_those_that_left() -> None:
    rows = _rows(1, 2, 3, 4)
    storage = rows.live.data_ptr()
    rows.select([0, 3])
    rows.append(_rows(5, 6))
    assert _first(rows) == [1, 4, 5, 6]
    assert rows.live.data_ptr() == storage


def test_full_storage_at_least_doubles() -> None:
    rows = _rows(1, 2, 3)
    rows.append(_rows(4))
    assert _first(rows) == [1, 2, 3, 4]
    storage = rows.live.data_ptr()
    rows.append(_rows(5, 6))
    assert _first(rows) == [1, 2, 3, 4, 5, 6]
    assert rows.live.data_ptr() == storage


def test_all_sequences_may_leave_before_others_join() -> None:
    rows = _rows(1, 2)
    rows.select([])
    assert rows.live.shape[1] == 0
    rows.append(_rows(3))
    assert _first(rows) == [3]


def test_added_slots_change_no_contents_and_are_finite() -> None:
    rows = _rows(1, 2)
    rows.reserve(5)
    assert rows.live.shape == (2, 2, 5, 3)
    assert rows.live[:, 1, :2].eq(2).all()
    assert rows.live[:, :, 2:].eq(0).all()
    rows.append(_rows(7, slots=3))
    assert rows.live[:, 2, :3].eq(7).all()
    assert rows.live.isfinite().all()


class _CopyCounter(TorchDispatchMode):
    """Counts the elements that are copied."""

    num_copied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "aten::copy_":
            self.num_copied += args[0].numel()
        return func(*args, **(kwargs or {}))


def test_only_the_slots_that_sequences_have_written_to_are_copied() -> None:
    rows = _rows(1, 2, 3, slots=4096)
    with _CopyCounter() as counter:
        rows.select([2, 1], num_used=[16, 2000, 10])
    assert counter.num_copied == 17 * rows.live[:, :1, :1].numel()
    assert _first(rows) == [3, 2]


def test_nothing_that_a_former_sequence_has_written_reaches_another_one() -> None:
    rows = _rows(1, 2, 3, slots=8)
    rows.live[:, 0, :6] = torch.nan
    rows.live[:, 2, 4:] = 0
    rows.select([2, 1], num_used=[6, 8, 4])
    assert rows.live.isfinite().all()
    rows.live[:, 1] = torch.nan
    rows.select([0], num_used=[4, 8])
    rows.append(_rows(5, slots=2))
    assert rows.live.isfinite().all()
    assert not rows.live[:, 1, 2:].any()
    assert _first(rows) == [3, 5]


def test_padding_in_the_last_slot_of_a_row_does_not_reach_the_next_sequence() -> None:
    rows = _rows(1, 2, 3, slots=9)
    rows.live[:, 0, -1] = rows.live[:, 1, -1] = torch.nan
    rows.select([2], num_used=[2, 2, 2])  # moves to the first row
    rows.append(_rows(4, slots=3))
    assert rows.live.isfinite().all()
