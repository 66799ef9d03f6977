"""Admission before preparation, limits of time, and requests whose client is gone."""

import json
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import httpx2
import pytest
from helpers.raw_http import posted, wait_until
from helpers.serving import MODEL, SECONDS, running, tiny_decoder
from openai import APIError, InternalServerError, RateLimitError

from inference.serving import decoding_options

BODY: dict[str, Any] = {"model": MODEL, "prompt": "def", "max_tokens": 4, "temperature": 0}


class Gate:
    """Holds the preparation of prompts, and counts the prompts that were encoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.is_open = Event()
        self._original = decoding_options.encode_prompt
        monkeypatch.setattr(decoding_options, "encode_prompt", self)

    def __call__(self, *arguments: Any) -> list[int]:
        assert self.is_open.wait(SECONDS)
        self.count += 1
        return self._original(*arguments)


def test_overload_is_refused_before_prompts_are_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with running(tiny_decoder(), places=2, queue=3) as server, server.client() as client:

        def served(_: int) -> str | RateLimitError:
            try:
                return client.completions.create(**BODY).choices[0].text
            except RateLimitError as error:
                return error

        with ThreadPoolExecutor(20) as pool:
            answers = [pool.submit(served, number) for number in range(20)]
            wait_until(lambda: sum(answer.done() for answer in answers) == 15)
            assert gate.count == 0
            gate.is_open.set()
            found = [answer.result() for answer in answers]
        refused = [answer for answer in found if isinstance(answer, RateLimitError)]
        assert len(refused) == 15
        assert all(int(error.response.headers["retry-after"]) >= 1 for error in refused)
        assert gate.count == 5
        assert client.completions.create(**BODY).choices


def test_a_client_that_leaves_during_the_preparation_frees_its_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate(monkeypatch)
    with running(tiny_decoder(), places=1, queue=0) as server:
        with posted(server.address, "/v1/completions", json.dumps(BODY).encode()):
            wait_until(lambda: server.server.service.num_active == 1)
        wait_until(lambda: server.server.service.num_active == 0)
        gate.is_open.set()
        assert httpx2.post(f"{server.url}/completions", json=BODY).status_code == 200
        assert server.server.engine.scheduler.num_waiting == 0


@pytest.mark.usefixtures("slow_steps")
def test_a_request_that_takes_too_long_is_ended() -> None:
    body = {**BODY, "max_tokens": 250}
    with running(tiny_decoder(), request_seconds=0.3) as server, server.client() as client:
        with pytest.raises(InternalServerError, match=r"takes longer than 0\.3 seconds") as info:
            client.completions.create(**body)
        assert info.value.status_code == 504
        stream = client.completions.create(stream=True, **body)
        with pytest.raises(APIError, match="takes longer than"):
            list(stream)
        server.wait_until_idle()
        page = httpx2.get(f"{server.root}/metrics").text
        assert 'jakiro_cancelled_total{why="timeout"} 2.0' in page
        assert client.completions.create(**BODY).choices


def test_requests_that_never_fit_are_not_tried_again() -> None:
    with running(tiny_decoder(), places=2, queue=3) as server:
        found = httpx2.post(f"{server.url}/completions", json={**BODY, "n": 6})
    error = found.json()["error"]
    assert (found.status_code, error["type"]) == (400, "invalid_request_error")
    assert "too many sequences" in error["message"]
    assert "retry-after" not in found.headers
