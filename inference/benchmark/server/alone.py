"""Comparison of answers under load with the answers to the same requests alone."""

from collections.abc import Mapping

from inference.benchmark.server.document import Comparisons, Difference
from inference.benchmark.server.plan import Question
from inference.client.answer import ServerAnswer

MOST_DIFFERENCES = 20  # largest number of differences that are stored
_SHOWN = 60  # characters of each text

Key = tuple[str, float]  # hash of a prompt, and a temperature


class AloneAnswers:
    """The answers to requests alone, with which answers under load are compared.

    Args:
        answers: complete answers by question.
    """

    def __init__(self, answers: Mapping[Key, ServerAnswer]) -> None:
        self._answers = answers
        self._counts = {True: [0, 0], False: [0, 0]}  # by whether it is greedy: all, equal
        self._differences: list[Difference] = []

    def compare(self, question: Question, answer: ServerAnswer) -> None:
        """Count an answer under load as equal or different.

        Args:
            question: question that was asked.
            answer: complete answer, or the beginning of one that was cut.
        """
        expected = self._answers[question.prompt, question.temperature]
        count = self._counts[question.temperature == 0]
        count[0] += 1
        if _is_equal(expected, answer):
            count[1] += 1
        elif len(self._differences) < MOST_DIFFERENCES:
            self._differences.append(_difference(question, expected.text, answer.text))

    @property
    def comparisons(self) -> Comparisons:
        """The results of all comparisons."""
        (greedy, greedy_equal), (sampled, sampled_equal) = self._counts[True], self._counts[False]
        return Comparisons(
            greedy=greedy,
            greedy_equal=greedy_equal,
            sampled=sampled,
            sampled_equal=sampled_equal,
            differences=tuple(self._differences),
        )


def _is_equal(expected: ServerAnswer, answer: ServerAnswer) -> bool:
    if answer.is_cut:
        return expected.text.startswith(answer.text)
    return (expected.text, expected.finish_reason) == (answer.text, answer.finish_reason)


def _difference(question: Question, alone: str, loaded: str) -> Difference:
    pairs = enumerate(zip(alone, loaded, strict=False))
    shorter = min(len(alone), len(loaded))
    position = next((index for index, (a, b) in pairs if a != b), shorter)
    return Difference(
        prompt=question.prompt,
        temperature=question.temperature,
        position=position,
        alone=alone[position : position + _SHOWN],
        loaded=loaded[position : position + _SHOWN],
    )
