"""Errors, the playground, disconnecting clients and a server that is starting, over a socket."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.resources import files
from threading import Event, Thread
from typing import Any

import httpx2
import pytest
import torch
from helpers.raw_http import posted, wait_until
from helpers.serving import MODEL, SECONDS, Running, running, tiny_decoder
from openai import (
    APIStatusError,
    BadRequestError,
    NotFoundError,
    OpenAI,
)
from transformers import LogitsProcessor, LogitsProcessorList

from inference import SpeculativeDecoder
from inference.serving.api_error import api_error_of
from inference.serving.decoding_options import DecodingOptions
from inference.serving.server import Server
from inference.serving.settings import ServeSettings
from jakiro.errors import (
    EngineStopped,
    JakiroError,
    NumericalError,
    PromptError,
    ResourceError,
    TargetNotSupported,
)

KEY = "secret-key-1"


def _body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "def main(", "max_tokens": 4, "temperature": 0, **fields}


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


def test_a_slash_at_the_end_redirects_nobody(server: Running) -> None:
    response = httpx2.post(f"{server.url}/completions/", json=_body())
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"


def test_sampling_options_have_an_effect(client: OpenAI, server: Running) -> None:
    body = _body(temperature=1.0, seed=3, max_tokens=10)
    own = {"top_k": 3, "min_p": 0.05, "repetition_penalty": 1.2}
    decoder = server.server.engine.decoder
    expected = decoder.generate(
        body["prompt"], temperature=1.0, seed=3, max_new_tokens=10, top_p=0.7, **own
    )
    found = client.completions.create(**body, top_p=0.7, extra_body=own)
    assert found.choices[0].text == expected.text
    # vLLM's value for no limit implies nothing.
    greedy = decoder.generate(body["prompt"], temperature=0, max_new_tokens=10)
    free = {"model": MODEL, "prompt": body["prompt"], "max_tokens": 10, "extra_body": {"top_k": -1}}
    assert client.completions.create(**free).choices[0].text == greedy.text
    # The target's generation config does not sample: top_p implies a temperature of 1.
    implied = client.completions.create(
        model=MODEL, prompt=body["prompt"], seed=3, max_tokens=10, top_p=0.7
    )
    alone = decoder.generate(body["prompt"], temperature=1.0, seed=3, max_new_tokens=10, top_p=0.7)
    assert implied.choices[0].text == alone.text


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.usefixtures("slow_steps")
def test_disconnecting_cancels_a_request(server: Running, stream: bool) -> None:
    scheduler = server.server.engine.scheduler
    service = server.server.service
    body = json.dumps(_body(max_tokens=200, stream=stream)).encode()
    with posted(server.address, "/v1/completions", body):
        wait_until(lambda: scheduler.num_running == 1)
        (job,) = scheduler._running.values()
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

    bodies = [_body(temperature=0.8, seed=seed, max_tokens=30) for seed in range(4)]
    alone = [client.completions.create(**body).choices[0].text for body in bodies]
    monkeypatch.setattr(engine, "prepare", planted)
    bad = _body(temperature=0.8, seed=666, max_tokens=60)

    def served(body: dict[str, Any]) -> str:
        try:
            return client.completions.create(**body).choices[0].text
        except APIStatusError as error:
            return f"failed with {error.status_code}: {error.code}"

    with ThreadPoolExecutor(5) as pool:
        *good, failed = pool.map(served, [*bodies, bad])
    assert good == alone
    assert failed == "failed with 500: decoding_failed"
    with httpx2.stream("POST", f"{server.url}/completions", json={**bad, "stream": True}) as sent:
        assert sent.status_code == 200
        *_, last = sent.read().decode().strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "decoding_failed"


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


TEXTS = {
    "/" if file.name == "index.html" else f"/playground/{file.name}": file.read_text()
    for file in (files("inference.serving") / "playground").iterdir()
}


def _get(server: Running, path: str, **headers: str) -> httpx2.Response:
    return httpx2.get(server.root + path, headers=headers)


def test_files_have_types_that_browsers_accept(server: Running) -> None:
    types = {"": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    for path, text in TEXTS.items():
        found = _get(server, path)
        assert (found.status_code, found.text) == (200, text)
        assert found.headers["content-type"].startswith(types[path.rpartition(".")[2].strip("/")])
        assert "script-src 'self'" in found.headers["content-security-policy"]


@pytest.mark.parametrize("path", ["/playground/missing.js", "/playground/..%2fapp.py", "/x.html"])
def test_nothing_else_is_served(server: Running, path: str) -> None:
    assert _get(server, path).status_code == 404


def test_the_page_needs_no_key_and_the_interface_does() -> None:
    with running(tiny_decoder(), api_keys=(KEY,)) as server:
        assert {_get(server, path).status_code for path in TEXTS} == {200}
        assert _get(server, "/v1/models").status_code == 401
        assert _get(server, "/v1/models", authorization=f"Bearer {KEY}").status_code == 200
    with running(tiny_decoder(), playground=False) as server:
        assert {_get(server, path).status_code for path in TEXTS} == {404}


def _dead() -> EngineStopped:
    error = EngineStopped("stopped")
    error.__cause__ = RuntimeError("the device is lost")
    return error


@pytest.mark.parametrize(
    ("error", "status", "code", "message"),
    [
        (PromptError("wrong", expected=1), 400, None, "wrong; expected: 1"),
        (EngineStopped("stopped"), 503, "unavailable", "the server is shutting down"),
        (_dead(), 503, "unavailable", "decoding has failed; see the log of the server"),
        (ResourceError("no memory"), 503, "unavailable", "no memory"),
        (NumericalError("NaN"), 500, "decoding_failed", "decoding has failed; see the log"),
    ],
    ids=str,
)
def test_the_status_says_whose_error_it_is(
    error: JakiroError, status: int, code: str | None, message: str
) -> None:
    found = api_error_of(error)
    assert found.status == status
    kind = "server_error" if code else "invalid_request_error"
    sent = found.body["error"]
    assert (sent["type"], sent["param"], sent["code"]) == (kind, None, code)
    assert sent["message"].startswith(message)
