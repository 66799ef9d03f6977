"""Steps are decided once: repeats get the stored verdict, and other trees are refused."""

import pytest

from inference.remote.messages import MessageError
from inference.remote.step_book import StepBook


def _refused(book: StepBook, step: int, digest: str) -> str:
    """Return the code of a refusal, which must not change the book."""
    before = dict(vars(book))
    with pytest.raises(MessageError) as found:
        book.verdict_of(step, digest)
    assert vars(book) == before
    assert found.value.status == 409
    return found.value.code


def test_a_step_is_decided_once_and_its_verdict_is_kept_until_the_next_one() -> None:
    book = StepBook()
    assert book.verdict_of(1, "a") is None
    book.store("a", b"first")
    assert _refused(book, 1, "b") == "step_conflict"
    for step in (-1, 0, 3):
        assert _refused(book, step, "a") == "out_of_order"
    assert book.verdict_of(2, "c") is None
    assert book.verdict_of(1, "a") == b"first"
    book.store("c", b"second")
    assert _refused(book, 1, "a") == "out_of_order"
    assert book.verdict_of(2, "c") == b"second"


def test_a_finished_text_takes_no_more_trees_but_repeats_its_verdict() -> None:
    book = StepBook(next_step=5)
    book.store("a", b"last", is_finished=True)
    assert _refused(book, 6, "b") == "session_finished"
    assert book.verdict_of(5, "a") == b"last"
