"""Errors, keys, limits, disconnecting clients and metrics, over a socket."""

import asyncio
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event, Thread
from typing import Any

import httpx2
import pytest
import torch
from helpers.raw_http import wait_until
from helpers.serving import MODEL, SECONDS, Running, running, tiny_decoder
from openai import (
    APIStatusError,
    BadRequestError,
    NotFoundError,
    OpenAI,
)
from transformers import LogitsProcessor, LogitsProcessorList

from inference import SpeculativeDecoder
from inference.serving.learning.adaptation import Learner
from inference.serving.scheduling.decoding_options import DecodingOptions
from inference.serving.server import Server
from inference.serving.settings import ServeSettings
from jakiro.errors import TargetNotSupported

KEY = "secret-key-1"


def _body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "def main(", "max_tokens": 4, "temperature": 0, **fields}


def _post(server: Running, content: bytes | str, path: str = "completions") -> httpx2.Response:
    return httpx2.post(f"{server.url}/{path}", content=content, timeout=SECONDS)


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"tools": [{}]}, "tools", "not supported"),
        ({"echo": True}, "echo", "False"),
        ({"presence_penalty": 2.5}, "presence_penalty", "less than or equal to 2"),
        ({"logit_bias": {"five": 1}}, "logit_bias", "pattern"),
        ({"logit_bias": {str(n): 0 for n in range(301)}}, "logit_bias", "at most 300"),
        ({"n": 10**6}, "n", "less than or equal to 8"),
        ({"temperature": True}, "temperature", "number"),
        ({"stop": ["x"] * 10**5}, "stop", "at most 4"),
        ({"jakiro": {"beams": 2}}, "jakiro.beams", "not supported"),
        ({"stream_options": {"include_usage": True}}, None, "requires stream"),
    ],
)
def test_a_wrong_field_is_named(
    server: Running, fields: dict[str, Any], param: str | None, reason: str
) -> None:
    response = _post(server, json.dumps(_body(**fields)))
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"] or "").startswith(param or "")
    assert error["type"] == "invalid_request_error"
    assert reason in error["message"]
    assert len(error["message"]) < 300


@pytest.mark.parametrize("fields", [{"max_tokens": 10**12}, {"prompt": "a b " * 400}])
def test_a_request_that_is_too_long_is_refused_with_both_lengths(
    client: OpenAI, fields: dict[str, Any]
) -> None:
    with pytest.raises(BadRequestError, match=r"at most 256 tokens.*got: \d+ prompt tokens"):
        client.completions.create(**_body(**fields))


def test_unknown_paths_and_methods_have_errors_of_the_same_form(server: Running) -> None:
    for path, method, status in (("/v1/nothing", "GET", 404), ("/v1/completions", "GET", 405)):
        response = httpx2.request(method, server.root + path)
        assert response.status_code == status
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", ["completions/", "chat/completions/"])
def test_a_slash_at_the_end_redirects_nobody(server: Running, path: str) -> None:
    response = _post(server, json.dumps(_body()), path)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"


def test_sampling_options_have_an_effect(client: OpenAI, server: Running) -> None:
    body = _body(temperature=1.0, seed=3, max_tokens=20)
    own = {"top_k": 3, "min_p": 0.05, "repetition_penalty": 1.2}
    decoder = server.server.engine.decoder
    expected = decoder.generate(
        body["prompt"], temperature=1.0, seed=3, max_new_tokens=20, top_p=0.7, **own
    )
    for extra in ({"jakiro": own}, own):  # also at the top level, as in vLLM
        found = client.completions.create(**body, top_p=0.7, extra_body=extra)
        assert found.choices[0].text == expected.text
    # vLLM's value for no limit implies nothing.
    greedy = decoder.generate(body["prompt"], temperature=0, max_new_tokens=20)
    free = {"model": MODEL, "prompt": body["prompt"], "max_tokens": 20, "extra_body": {"top_k": -1}}
    assert client.completions.create(**free).choices[0].text == greedy.text
    # The target's generation config does not sample: top_p implies a temperature of 1.
    implied = client.completions.create(
        model=MODEL, prompt=body["prompt"], seed=3, max_tokens=20, top_p=0.7
    )
    alone = decoder.generate(body["prompt"], temperature=1.0, seed=3, max_new_tokens=20, top_p=0.7)
    assert implied.choices[0].text == alone.text


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.usefixtures("slow_steps")
def test_disconnecting_cancels_a_request(server: Running, stream: bool) -> None:
    scheduler = server.server.engine.scheduler
    service = server.server.service
    body = json.dumps(_body(max_tokens=200, stream=stream)).encode()
    connection = socket.create_connection(server.address)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    wait_until(lambda: scheduler.num_running == 1)
    (reply,) = service._admission._replies
    (job,) = reply.jobs
    connection.close()
    wait_until(lambda: scheduler.num_running == 0)
    assert job.is_ended
    assert len(job.sequences[0].new_token_ids) < 100
    wait_until(lambda: service.num_active == 0)


def test_the_failure_of_one_request_leaves_the_others_alone(
    monkeypatch: pytest.MonkeyPatch, server: Running, client: OpenAI
) -> None:
    class Fails(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores * torch.nan if input_ids.shape[1] > 20 else scores

    engine = server.server.engine
    original = engine.prepare

    def planted(prompt: Any, options: DecodingOptions, **others: Any) -> Any:
        if options.seed == 666:
            processors = {"logits_processor": LogitsProcessorList([Fails()])}
            options = replace(options, others=processors)
        return original(prompt, options, **others)

    bodies = [_body(temperature=0.8, seed=seed, max_tokens=30) for seed in range(7)]
    alone = [client.completions.create(**body).choices[0].text for body in bodies]
    monkeypatch.setattr(engine, "prepare", planted)
    bad = _body(temperature=0.8, seed=666, max_tokens=60)

    def served(body: dict[str, Any]) -> str:
        try:
            return client.completions.create(**body).choices[0].text
        except APIStatusError as error:
            return f"failed with {error.status_code}: {error.code}"

    with ThreadPoolExecutor(8) as pool:
        *good, failed = pool.map(served, [*bodies, bad])
    assert good == alone
    assert failed == "failed with 500: decoding_failed"
    with httpx2.stream("POST", f"{server.url}/completions", json={**bad, "stream": True}) as sent:
        assert sent.status_code == 200
        *_, last = sent.read().decode().strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "decoding_failed"


def test_a_user_forgets_the_own_texts_only() -> None:
    learner = Learner(("false",), "drafter")
    keys = ("first-secret", "second-secret")
    with running(tiny_decoder(trained=True), learner, adapt="shared", api_keys=keys) as served:
        adaptation = served.server.service.adaptation
        assert adaptation is not None
        for number, key in enumerate(keys, 1):
            with served.client(key) as client:
                for first in range(2 * number):
                    client.completions.create(model=MODEL, prompt=[first, 7], max_tokens=3)
        wait_until(lambda: len(adaptation._ring) == 6)
        url = f"{served.url}/adaptation"
        assert httpx2.delete(url).status_code == 401
        assert len(adaptation._ring) == 6
        found = httpx2.delete(url, headers={"Authorization": "Bearer second-secret"})
        assert found.json() == {
            "object": "adaptation.deleted",
            "deleted": True,
            "texts": 4,
            "versions": 0,
        }
        assert len(adaptation._ring) == 2
        assert adaptation._ring.traffic(9, 9).tenants == ("key 1",)


class Starting:
    """A server whose decoder is loaded as soon as the test allows it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.may_load = Event()
        self.urls: list[str] = []
        self.outcome: list[Any] = []
        self._error = error
        settings = ServeSettings(port=0, capacity=64, model_name=MODEL)
        self.server = Server(self._load, settings)
        self.root = self.server.url.removesuffix("/v1")
        self.thread = Thread(target=self._run)
        self.thread.start()
        wait_until(lambda: self.server.started)

    def _load(self) -> SpeculativeDecoder:
        assert self.may_load.wait(SECONDS)
        if self._error is not None:
            raise self._error
        return tiny_decoder()

    def _run(self) -> None:
        try:
            self.outcome.append(asyncio.run(self.server.run_until_drained(self.urls.append)))
        except Exception as error:  # noqa: BLE001 - the test compares it
            self.outcome.append(error)

    def join(self) -> Any:
        """Wait for the end of the server, and return its exit code or its error."""
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()
        return self.outcome[0]

    def health(self, path: str = "/health") -> tuple[int, dict[str, Any]]:
        """Return the status and body of an answer about the state."""
        found = httpx2.get(self.root + path)
        return found.status_code, found.json()


LOADING = {"status": "loading", "live": True, "ready": False}
READY = {"status": "ready", "live": True, "ready": True}


def test_requests_are_refused_until_the_model_is_loaded() -> None:
    starting = Starting()
    body = {"model": MODEL, "prompt": "a", "max_tokens": 2}
    assert starting.health() == (503, LOADING)
    assert starting.health("/health/live") == (200, LOADING)
    for path in ("completions", "chat/completions"):
        found = httpx2.post(f"{starting.root}/v1/{path}", json=body)
        assert found.status_code == 503
        assert int(found.headers["retry-after"]) >= 1
        assert found.json()["error"]["code"] == "loading"
    assert httpx2.get(f"{starting.root}/v1/models").status_code == 503
    assert httpx2.get(f"{starting.root}/metrics").status_code == 200
    assert starting.urls == []
    starting.may_load.set()
    wait_until(lambda: starting.urls == [starting.server.url])
    assert starting.health() == (200, READY)
    assert starting.health("/health/live") == (200, READY)
    assert httpx2.post(f"{starting.root}/v1/completions", json=body).status_code == 200
    starting.server.drain()
    assert starting.join() == 0


def test_a_signal_during_loading_ends_the_server_at_once() -> None:
    starting = Starting()
    starting.server.drain()
    assert starting.join() == 0
    assert starting.server.is_loading
    assert starting.urls == []
    starting.may_load.set()
    wait_until(lambda: not starting.server.is_loading)


def test_an_error_of_loading_ends_the_server() -> None:
    error = TargetNotSupported("this target has another attention")
    starting = Starting(error)
    starting.may_load.set()
    assert starting.join() is error
    assert not starting.server.is_loading
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(starting.root + "/health")


def test_the_model_is_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "jakiro"


def test_another_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(NotFoundError, match="expected: tiny") as info:
        client.models.retrieve("other/model")
    assert info.value.code == "model_not_found"
    with pytest.raises(NotFoundError, match="expected: tiny"):
        client.completions.create(model="gpt-4", prompt="a")
