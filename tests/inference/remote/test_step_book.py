"""Steps are decided once: repeats get the stored verdict, and other trees are refused."""

import pytest

from inference.remote.errors import SessionGone, StepConflict
from inference.remote.step_book import StepBook


def _decided() -> StepBook:
    """Return a book in which step 1 was decided for the tree `a`."""
    book = StepBook()
    assert book.submit(1, "a")
    book.store("a", b"first")
    return book


def _refused(book: StepBook, step: int, digest: str) -> str:
    """Return the code of a refusal, which must not change the book."""
    before = dict(vars(book))
    with pytest.raises(StepConflict) as found:
        book.submit(step, digest)
    assert vars(book) == before
    assert found.value.next_step == book.next_step
    return found.value.code


def test_a_repeat_gets_the_stored_verdict() -> None:
    book = _decided()
    for count in (1, 2):
        assert not book.submit(1, "a")
        assert book.num_replays == count
    assert book.last is not None
    assert (book.last.body, book.next_step) == (b"first", 2)


def test_another_tree_for_a_decided_step_is_refused() -> None:
    book = _decided()
    assert _refused(book, 1, "b") == "step_conflict"
    assert not book.submit(1, "a")


@pytest.mark.parametrize("step", [-1, 0, 3])
def test_a_step_at_the_wrong_time_is_refused(step: int) -> None:
    assert _refused(_decided(), step, "a") == "out_of_order"


def test_the_last_verdict_is_kept_until_the_next_one_is_stored() -> None:
    book = _decided()
    book.submit(2, "c")
    assert not book.submit(1, "a")
    book.store("c", b"second")
    assert _refused(book, 1, "a") == "out_of_order"
    assert not book.submit(2, "c")


def test_a_finished_text_takes_no_more_trees_but_repeats_its_verdict() -> None:
    book = StepBook(next_step=5)
    book.submit(5, "a")
    book.store("a", b"last", is_finished=True)
    assert _refused(book, 6, "b") == "session_finished"
    assert not book.submit(5, "a")


def test_a_closed_session_refuses_everything() -> None:
    book = _decided()
    book.close()
    for step, digest in ((1, "a"), (2, "b")):
        with pytest.raises(SessionGone):
            book.submit(step, digest)
    assert book.last is None
