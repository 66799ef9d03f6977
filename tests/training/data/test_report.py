"""What became of the data is said by every run, and once in a study."""

import pytest

from training.data.counts import DataCounts, PackCounts, ReadCounts
from training.data.report import report, said_once


def counts(num_rows: int) -> DataCounts:
    read = ReadCounts(
        rows=9, skipped=0, dropped=0, documents=9, tokens=90, responses=90, highest_id=1
    )
    packed = PackCounts(
        rows=num_rows, documents=9, padding=0.2, split=0, left_out=0, left_out_tokens=0
    )
    return DataCounts(read=read, packed=packed)


def test_runs_of_a_study_say_what_is_new_and_runs_alone_say_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    with said_once():
        for num_rows in (3, 3, 4):
            report(counts(num_rows))
    assert caplog.text.count("9 rows read") == caplog.text.count("is padding: ") == 1
    assert caplog.text.count("documents packed into 3 rows") == 1
    assert caplog.text.count("documents packed into 4 rows") == 1
    report(counts(3))
    report(counts(3))
    assert caplog.text.count("9 rows read") == 3
