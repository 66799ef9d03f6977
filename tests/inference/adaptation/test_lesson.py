"""Lessons and results are read without trust, and errors show no token ids."""

from pathlib import Path

import pytest

from inference.adaptation.lesson import Lesson, Passage, read_lesson, read_result
from jakiro.errors import DataError


def _lesson() -> Lesson:
    passage = Passage(token_ids=(1, 2, 3), prompt_length=1)
    return Lesson(
        folder=Path("versions"),
        number=1,
        parent=0,
        drafter="drafter",
        target=None,
        identity="x",
        dtype="float32",
        device="cpu",
        tenants=("a",),
        learned=(passage,),
        held_out=(passage,),
    )


def test_a_lesson_survives_the_pipe() -> None:
    assert read_lesson(_lesson().model_dump_json().encode()) == _lesson()


@pytest.mark.parametrize("cut", [0, 1, 100, -1])
def test_a_lesson_that_was_cut_off_is_refused_without_its_tokens(cut: int) -> None:
    data = _lesson().model_dump_json().encode()
    with pytest.raises(DataError, match="1 wrong fields") as info:
        read_lesson(data[:cut])
    assert "1,2,3" not in str(info.value)


@pytest.mark.parametrize("output", [b"", b"\n", b"killed", b'{"outcome": "bett'])
def test_an_output_without_a_result_is_a_failure(output: bytes) -> None:
    assert read_result(output).outcome == "failed"
