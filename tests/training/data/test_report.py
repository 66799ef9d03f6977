"""Each run logs the counts of its data; a study logs equal lines only once."""

import pytest

from training.data.counts import DataCounts, PackCounts, ReadCounts
from training.data.report import advice, report, report_once


def counts(num_sequences: int) -> DataCounts:
    read = ReadCounts(
        records=9, skipped=0, dropped=0, documents=9, tokens=90, responses=90, highest_id=1
    )
    packed = PackCounts(
        sequences=num_sequences, documents=9, padding=0.2, split=0, left_out=0, left_out_tokens=0
    )
    return DataCounts(read=read, packed=packed)


def test_runs_of_a_study_log_new_lines_only_and_single_runs_log_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    with report_once():
        for num_sequences in (3, 3, 4):
            report(counts(num_sequences))
    assert caplog.text.count("9 records read") == caplog.text.count("are padding: ") == 1
    assert caplog.text.count("documents packed into 3 sequences") == 1
    assert caplog.text.count("documents packed into 4 sequences") == 1
    report(counts(3))
    report(counts(3))
    assert caplog.text.count("9 records read") == 3


def test_counts_that_are_zero_are_left_out() -> None:
    lines = list(counts(3).lines())
    assert lines[0] == "9 records read, 0 skipped; 9 documents kept"
    assert lines[2] == "9 documents packed into 3 sequences with 20.0% padding"
    split = counts(3).packed.model_copy(update={"split": 2, "left_out": 1, "left_out_tokens": 7})
    line = list(DataCounts(read=counts(3).read, packed=split).lines())[2]
    assert line.endswith(
        "; 2 documents split; 1 piece without a response or of fewer than two tokens dropped "
        "(7 tokens)"
    )
    one = counts(3).read.model_copy(update={"records": 1, "documents": 1})
    line = next(DataCounts(read=one, packed=split).lines())
    assert line == "1 record read, 0 skipped; 1 document kept"


def test_a_single_sequence_comes_without_advice_on_padding() -> None:
    assert advice(counts(1).packed) is None
    assert advice(counts(2).packed) is not None
