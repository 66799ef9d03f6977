"""Prompts with the answers of all methods; an answer that several methods gave is shown once."""

from typing import NamedTuple

from inference.benchmark.document import ComparisonDocument
from inference.benchmark.report.style import ELLIPSIS

MOST_SHOWN = 20  # prompts on a page
_LONGEST_TITLE = 90  # characters


class SharedAnswer(NamedTuple):
    """An answer, and the methods that gave it at a temperature."""

    temperature: float
    methods: list[str]
    text: str


class Exchange(NamedTuple):
    """A prompt and its answers."""

    title: str  # beginning of the question, on one line
    question: str
    answers: list[SharedAnswer]


def exchanges_of(document: ComparisonDocument) -> list[Exchange]:
    """Return the first prompts with their answers; empty if the document has no texts."""
    answers: dict[str, dict[tuple[float, str], list[str]]] = {}
    for method in document.methods:
        for sample in method.samples:
            if sample.answer is not None and sample.prompt in document.questions:
                own = answers.setdefault(sample.prompt, {})
                own.setdefault((method.temperature, sample.answer), []).append(method.name)
    shown = [prompt for prompt in document.questions if prompt in answers][:MOST_SHOWN]
    return [
        Exchange(
            _title(document.questions[prompt]),
            document.questions[prompt],
            [SharedAnswer(at, methods, text) for (at, text), methods in answers[prompt].items()],
        )
        for prompt in shown
    ]


def _title(question: str) -> str:
    line = " ".join(question.split())
    return line if len(line) <= _LONGEST_TITLE else line[: _LONGEST_TITLE - 1] + ELLIPSIS
