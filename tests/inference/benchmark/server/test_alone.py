"""Answers under load are compared with the answers alone."""

from inference.benchmark.server.alone import MOST_DIFFERENCES, AloneAnswers
from inference.benchmark.server.plan import Question
from inference.client.answer import ServerAnswer
from inference.client.request import ServerRequest

GREEDY = Question("p", 0.0, ServerRequest("p", 8))
SAMPLED = Question("p", 1.0, ServerRequest("p", 8))


def _answer(text: str, finish_reason: str | None = "length") -> ServerAnswer:
    return ServerAnswer(200, text, finish_reason=finish_reason, is_cut=finish_reason is None)


def _compared() -> AloneAnswers:
    return AloneAnswers({("p", 0.0): _answer("abcdef"), ("p", 1.0): _answer("xyz")})


def test_equal_answers_and_beginnings_of_cut_ones_are_equal() -> None:
    alone = _compared()
    alone.compare(GREEDY, _answer("abcdef"))
    alone.compare(GREEDY, _answer("abc", None))
    alone.compare(SAMPLED, _answer("xyz"))
    found = alone.comparisons
    assert (found.greedy, found.greedy_equal, found.sampled, found.sampled_equal) == (2, 2, 1, 1)
    assert (found.num_different, found.differences) == (0, ())


def test_differences_are_counted_and_the_first_ones_kept() -> None:
    alone = _compared()
    alone.compare(GREEDY, _answer("abXdef"))
    alone.compare(GREEDY, _answer("abX", None))
    alone.compare(GREEDY, _answer("abcdef", "stop"))
    for _ in range(MOST_DIFFERENCES):
        alone.compare(SAMPLED, _answer("xy"))
    found = alone.comparisons
    assert found.num_different == MOST_DIFFERENCES + 3
    assert found.greedy_equal == found.sampled_equal == 0
    assert len(found.differences) == MOST_DIFFERENCES
    first, _, third, fourth = found.differences[:4]
    assert (first.position, first.alone, first.loaded) == (2, "cdef", "Xdef")
    assert (third.position, third.alone, third.loaded) == (6, "", "")
    assert (fourth.position, fourth.temperature) == (2, 1.0)
