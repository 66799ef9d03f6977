"""Requests to a busy server are repeated after the time that it asks for."""

import asyncio
import itertools
import time
from datetime import UTC, datetime
from random import Random
from typing import Any

import pytest
from helpers.false_server import Made, completion, false_server

from inference.client.answer import ServerAnswer
from inference.client.client import ServerClient
from inference.client.patience import ask_patiently, seconds_to_wait
from inference.client.request import ServerRequest

NOW = datetime(2026, 5, 1, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("3", 3.0),
        ("0.5", 0.5),
        ("-2", 0.0),
        (None, 1.0),
        ("soon", 1.0),
        ("nan", 1.0),
        ("Fri, 01 May 2026 12:00:07 GMT", 7.0),
        ("Fri, 01 May 2026 11:00:00 GMT", 0.0),
    ],
)
def test_the_header_is_a_number_or_a_date(header: str | None, seconds: float) -> None:
    assert seconds_to_wait(header, NOW) == seconds


def _asked(refusals: int, seconds: float = 30.0) -> tuple[ServerAnswer, list[float]]:
    times: list[float] = []

    def answer(_: str, body: dict[str, Any]) -> Made:
        times.append(time.monotonic())
        if len(times) <= refusals:
            return Made(429, {"error": {"message": "busy"}}, {"retry-after": "0.1"})
        return Made(body=completion(body["prompt"]))

    async def ask(url: str) -> ServerAnswer:
        async with ServerClient(url, seconds=seconds) as client:
            request = ServerRequest("Once", 4, is_streamed=False)
            return await ask_patiently(client, request, Random(0))

    with false_server(answer) as url:
        return asyncio.run(ask(url)), times


def test_a_refused_request_is_sent_again_after_the_time_in_the_header() -> None:
    answer, times = _asked(2)
    assert (answer.text, answer.refusals, answer.error) == ("Once", 2, None)
    assert all(later - earlier >= 0.1 for earlier, later in itertools.pairwise(times))
    assert 0.2 <= answer.waited < 5
    assert answer.seconds < answer.waited


def test_a_request_that_is_always_refused_is_given_up() -> None:
    answer, times = _asked(10**6, seconds=0.3)
    assert answer.status == 429
    assert answer.error == "busy"
    assert 2 <= len(times) < 20
