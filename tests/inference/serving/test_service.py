"""Admission before preparation, limits of time, and requests whose client is gone."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Event
from typing import Any

import httpx2
import pytest
from helpers.raw_http import connected, post_of, wait_until
from helpers.serving import MODEL, SECONDS, running, tiny_decoder
from openai import APIError, InternalServerError, RateLimitError

from inference.engine.context import Context
from inference.serving.answers.reply import Reply
from inference.serving.api_error import ApiError
from inference.serving.scheduling import decoding_options
from inference.serving.scheduling.decoding_options import DecodingOptions
from inference.serving.service import Admission

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
        with connected(server.address) as connection:
            connection.sendall(post_of("/v1/completions", json.dumps(BODY).encode()))
            wait_until(lambda: server.server.service.num_active == 1)
        wait_until(lambda: server.server.service.num_active == 0)
        gate.is_open.set()
        assert httpx2.post(f"{server.url}/completions", json=BODY).status_code == 200
        assert server.server.engine.scheduler.num_waiting == 0


@pytest.mark.usefixtures("slow_steps")
def test_a_request_that_takes_too_long_is_ended() -> None:
    body = {**BODY, "max_tokens": 250}
    with running(tiny_decoder(), request_seconds=0.3) as server, server.client() as client:
        with pytest.raises(InternalServerError, match=r"takes too long.*0\.3 seconds") as info:
            client.completions.create(**body)
        assert info.value.status_code == 504
        stream = client.completions.create(stream=True, **body)
        with pytest.raises(APIError, match="takes too long"):
            list(stream)
        server.wait_until_idle()
        page = httpx2.get(f"{server.root}/metrics").text
        assert 'jakiro_cancelled_total{why="timeout"} 2.0' in page
        assert client.completions.create(**BODY).choices


def test_nothing_of_an_earlier_prompt_is_used_again() -> None:
    """Users must not learn from times what others have asked."""
    body = {**BODY, "prompt": "def main(argument): " * 8}
    read: list[int] = []
    original = Context.read

    def counted(context: Context, token_ids: Any, offset: int, count: int) -> Any:
        read.append(count)
        return original(context, token_ids, offset, count)

    with running(tiny_decoder()) as server, server.client() as client:
        for _ in range(2):
            read.clear()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Context, "read", counted)
                usage = client.completions.create(**body).usage
            assert usage is not None
            assert sum(read) == usage.prompt_tokens


def _reply(count: int, lane: int = 0, user: str = "") -> Any:
    async def made() -> Reply:
        return Reply(["a"] * count, DecodingOptions(), lane=lane, user=user)

    return asyncio.run(made())


def test_room_is_freed_by_the_end_of_a_job_or_of_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    admission = Admission(places=1, queue=2)
    first = _reply(2)
    with ExitStack() as running:
        running.enter_context(admission.admit(first))
        running.enter_context(admission.admit(_reply(1)))
        running.enter_context(admission.admit(_reply(3, lane=1)))
        refused = admission.admit(_reply(1))
        with pytest.raises(ApiError, match="too many requests are waiting") as info, refused:
            pass
        assert info.value.status == 429
        # As if its jobs had ended, although their reader has not taken all of their text.
        monkeypatch.setattr(first, "prompts", [])
        with admission.admit(_reply(2)):
            pass
        with admission.admit(_reply(2)):
            pass


def test_a_user_cannot_take_the_room_of_the_others() -> None:
    admission = Admission(places=2, queue=3, has_several_users=True)
    with ExitStack() as running:
        running.enter_context(admission.admit(_reply(1, user="one")))
        with admission.admit(_reply(2, user="one")):
            refused = admission.admit(_reply(1, user="one"))
            with pytest.raises(ApiError, match="of this key; expected: at most 3") as info, refused:
                pass
            assert info.value.status == 429
            running.enter_context(admission.admit(_reply(3, lane=1, user="one")))
            running.enter_context(admission.admit(_reply(2, user="other")))
            nothing_left = admission.admit(_reply(1, user="other"))
            with pytest.raises(ApiError), nothing_left:
                pass
        with admission.admit(_reply(1, user="one")):
            pass
        never = admission.admit(_reply(4, user="third"))
        with pytest.raises(ApiError, match="at most 3; got: 4") as info, never:
            pass
        assert info.value.status == 400


def test_the_time_after_which_to_try_again_follows_the_duration_of_requests() -> None:
    admission = Admission(places=2, queue=4)
    for _ in range(50):
        admission.observe(5.0)
    with admission.admit(_reply(6)), pytest.raises(ApiError) as info:
        admission.admit(_reply(1)).__enter__()
    assert info.value.headers == {"retry-after": "15"}
