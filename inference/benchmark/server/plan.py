"""The order of the requests of a load test, and the random choices about each request."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Any, NamedTuple

from inference.benchmark.server.document import LoadSettings
from inference.client.request import ServerRequest, prompt_for
from inference.generation.prompt_file import BenchPrompt


class BadRequest(NamedTuple):
    """A request with a fault."""

    fault: str  # description of the fault
    path: str
    content: bytes


def bad_requests(model: str) -> list[BadRequest]:
    """Return one request for each kind of fault.

    Args:
        model: name of the served model.
    """
    body: dict[str, Any] = {"model": model, "prompt": "Once", "max_tokens": 4}
    chat: dict[str, Any] = {"model": model, "max_tokens": 4}
    faults: dict[str, tuple[str, Any]] = {
        "no prompt": ("completions", {"model": model}),
        "an unknown model": ("completions", body | {"model": f"not-{model}"}),
        "a negative length": ("completions", body | {"max_tokens": -1}),
        "a temperature that is a text": ("completions", body | {"temperature": "hot"}),
        "messages that are a text": ("chat/completions", chat | {"messages": "Hello"}),
        "a message without a role": ("chat/completions", chat | {"messages": [{"content": "Hi"}]}),
        "an unknown path": ("compositions", body),
    }
    encoded = [
        BadRequest(fault, path, json.dumps(content).encode())
        for fault, (path, content) in faults.items()
    ]
    return [BadRequest("no JSON", "completions", b'{"model": '), *encoded]


class Question(NamedTuple):
    """A prompt at a temperature; the same question always has the same seed."""

    prompt: str  # hash of the prompt's content
    temperature: float
    request: ServerRequest


@dataclass(frozen=True)
class PlannedRequest:
    """One request of a load test; either a question or a bad request."""

    question: Question | None = None
    bad: BadRequest | None = None
    is_streamed: bool = True
    cut_after: int | None = None  # number of parts of the text; None to read all of it


def questions_of(settings: LoadSettings, prompts: Sequence[BenchPrompt]) -> list[Question]:
    """Return every prompt at every temperature.

    Args:
        settings: settings of the load test.
        prompts: prompts without duplicates.
    """
    return [
        Question(
            prompt.fingerprint,
            temperature,
            ServerRequest(
                prompt=prompt_for(prompt.first, as_chat=settings.chat),
                max_tokens=settings.max_new_tokens,
                temperature=temperature,
                top_p=settings.top_p if temperature else None,
                seed=settings.seed + number if temperature else None,
            ),
        )
        for number, prompt in enumerate(prompts)
        for temperature in settings.temperatures
    ]


def planned(
    settings: LoadSettings, questions: Sequence[Question], model: str
) -> Iterator[PlannedRequest]:
    """Yield the requests of a load test, endlessly if the test is limited by time.

    All questions are asked once before any of them is asked again.

    Args:
        settings: settings of the load test.
        questions: all questions.
        model: name of the served model.
    """
    endless = _endless(settings, questions, bad_requests(model))
    if settings.seconds is not None:
        return endless
    return islice(endless, settings.requests or len(questions))


def _endless(
    settings: LoadSettings, questions: Sequence[Question], bad: Sequence[BadRequest]
) -> Iterator[PlannedRequest]:
    source = Random(settings.seed)
    while True:
        for question in source.sample(questions, len(questions)):
            while source.random() < settings.bad_share:
                yield PlannedRequest(bad=source.choice(bad))
            yield _asked(settings, question, source)


def _asked(settings: LoadSettings, question: Question, source: Random) -> PlannedRequest:
    # The same numbers are taken for every request, so that one share does not affect another.
    cut, whole, after = source.random(), source.random(), source.random()
    if cut < settings.cut_share:
        return PlannedRequest(question, cut_after=1 + int(after * settings.max_new_tokens / 2))
    return PlannedRequest(question, is_streamed=whole >= settings.unstreamed_share)
