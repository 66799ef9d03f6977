"""The requests of a load are the same for the same seed, and in the wanted shares."""

from collections import Counter
from itertools import islice
from typing import Any

import httpx2
import pytest
from helpers.serving import MODEL, running, tiny_decoder

from inference.benchmark.server.document import LoadSettings
from inference.benchmark.server.plan import bad_requests, planned, questions_of
from inference.generation.prompt_file import prompt_of
from jakiro.errors import ConfigError
from jakiro.utils.settings import validate_settings

PROMPTS = [prompt_of("a"), prompt_of([1, 2]), prompt_of([{"role": "user", "content": "c"}])]


def _settings(**changes: Any) -> LoadSettings:
    values = {"url": "http://x", "prompts": "x.jsonl", "temperatures": (0.0, 1.0), **changes}
    return validate_settings(LoadSettings, values, source="a test")


def test_a_question_is_a_prompt_at_a_temperature_with_a_seed_of_its_own() -> None:
    questions = questions_of(_settings(top_p=0.9, seed=5, max_new_tokens=7), PROMPTS)
    requests = [question.request for question in questions]
    assert [request.temperature for request in requests] == [0.0, 1.0] * 3
    assert [request.seed for request in requests] == [None, 5, None, 6, None, 7]
    assert [request.top_p for request in requests] == [None, 0.9] * 3
    assert [request.path for request in requests[::2]] == [*["completions"] * 2, "chat/completions"]
    assert {request.max_tokens for request in requests} == {7}
    assert questions_of(_settings(chat=True), PROMPTS)[0].request.is_chat


def test_every_question_is_asked_once_before_any_is_asked_again() -> None:
    settings = _settings(requests=12)
    questions = questions_of(settings, PROMPTS)
    found = [request.question for request in planned(settings, questions, "m")]
    assert len(found) == 12
    assert sorted(map(id, found[:6])) == sorted(map(id, questions))
    assert sorted(map(id, found[6:])) == sorted(map(id, questions))
    assert found[:6] != questions
    assert len(list(planned(_settings(), questions, "m"))) == 6


def test_the_shares_are_those_of_the_settings() -> None:
    settings = _settings(
        seconds=1.0, bad_share=0.2, cut_share=0.25, unstreamed_share=0.5, max_new_tokens=10
    )
    questions = questions_of(settings, PROMPTS)
    found = list(islice(planned(settings, questions, "m"), 4000))
    assert found == list(islice(planned(settings, questions, "m"), 4000))
    bad = [request for request in found if request.bad is not None]
    asked = [request for request in found if request.bad is None]
    cut = [request for request in asked if request.cut_after is not None]
    whole = [request for request in asked if not request.is_streamed]
    assert 0.17 < len(bad) / len(found) < 0.23
    assert 0.22 < len(cut) / len(asked) < 0.28
    assert 0.34 < len(whole) / len(asked) < 0.41  # half of those that are not cut
    assert all(request.is_streamed for request in cut)
    assert {request.cut_after for request in cut} == {1, 2, 3, 4, 5}
    counts = Counter(request.bad.fault for request in bad if request.bad is not None)
    assert len(counts) == 8
    assert min(counts.values()) > 50


def test_one_limit_is_enough() -> None:
    with pytest.raises(ConfigError, match="--requests and --seconds"):
        _settings(requests=3, seconds=3.0)


def test_every_bad_request_is_refused() -> None:
    requests = bad_requests(MODEL)
    assert len({request.fault for request in requests}) == len(requests)
    with running(tiny_decoder()) as server:
        for request in requests:
            response = httpx2.post(f"{server.url}/{request.path}", content=request.content)
            assert response.status_code in (400, 404), request.fault
            assert response.json()["error"]["message"]
