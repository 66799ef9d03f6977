"""A client of a real server, and of false ones that behave badly."""

import asyncio
import socket
from typing import Any

import pytest
from helpers.false_server import MODELS, Made, completion, events, false_server
from helpers.serving import MODEL, SECONDS, running, tiny_decoder

from inference.client.answer import ServerAnswer
from inference.client.client import ServedModel, ServerClient
from inference.client.request import ServerRequest
from jakiro.errors import ConfigError, ResourceError

KEY = "secret-key-1"
REQUEST = ServerRequest("def main(", 12, temperature=0.0)


def _connected(url: str, model: str | None = None, key: str | None = None) -> ServedModel:
    async def connect() -> ServedModel:
        async with ServerClient(url, key) as client:
            return await client.connect(model)

    return asyncio.run(connect())


def _asked(
    url: str, request: ServerRequest = REQUEST, cut_after: int | None = None, **options: Any
) -> ServerAnswer:
    async def ask() -> ServerAnswer:
        async with ServerClient(url, **{"seconds": SECONDS, **options}) as client:
            await client.connect()
            return await client.ask(request, cut_after)

    return asyncio.run(ask())


def test_texts_of_a_server_are_those_of_its_decoder() -> None:
    decoder = tiny_decoder(trained=True)
    expected = decoder.generate("def main(", temperature=0, max_new_tokens=12)
    with running(decoder, api_keys=(KEY,)) as server:
        for url in (server.url, f"{server.url}/", server.root):
            assert _connected(url, key=KEY) == (MODEL, True)
        streamed = _asked(server.url, key=KEY)
        whole = _asked(server.url, ServerRequest("def main(", 12, 0.0, is_streamed=False), key=KEY)
        for answer in (streamed, whole):
            assert (answer.text, answer.error, answer.status) == (expected.text, None, 200)
            assert answer.usage is not None
            assert answer.usage.completion == 12
            assert answer.usage.accepted is not None
        assert len(whole.arrivals) == 1 < len(streamed.arrivals)
        cut = _asked(server.url, cut_after=2, key=KEY)
        assert cut.is_cut
        assert len(cut.arrivals) == 2
        assert expected.text.startswith(cut.text)
        with pytest.raises(ConfigError, match=r"refuses the API key.*no key.*JAKIRO_API_KEY"):
            _connected(server.url)
        with pytest.raises(ConfigError, match=r"refuses the API key.*with this key"):
            _connected(server.url, key="another-key")
        with pytest.raises(ConfigError, match=r"does not have this model.*did you mean .*tiny"):
            _connected(server.url, "tinny", KEY)


def test_a_server_that_cannot_be_reached_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(ResourceError, match=rf"cannot reach .*:{port}/v1.*start the server"):
        _connected(f"http://127.0.0.1:{port}")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host/v1", "http://", "http://[::1", ""])
def test_a_text_that_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="URL is not the address"):
        ServerClient(url)


@pytest.mark.parametrize(
    ("models", "error", "message"),
    [
        (Made(404, {"detail": "Not Found"}), ConfigError, "no interface like OpenAI's"),
        (Made(200, b"<html>"), ConfigError, "no interface like OpenAI's"),
        (Made(503, {"status": "draining"}), ResourceError, "is not ready.*503"),
        (Made(403, {}), ConfigError, "refuses the API key"),
        (Made(200, {"data": []}), ConfigError, "several models, or none"),
        (Made(200, {"data": [{"id": "a"}, {"id": "b"}]}), ConfigError, "one of a, b.*--model"),
    ],
)
def test_other_servers_are_refused(models: Made, error: type[Exception], message: str) -> None:
    with (
        false_server(lambda *_: Made(), models) as url,
        pytest.raises(error, match=message),
    ):
        _connected(url)


def test_a_server_that_lists_no_models_may_still_have_the_named_one() -> None:
    with false_server(lambda *_: Made(), Made(404, {})) as url:
        assert _connected(url, "mine") == ("mine", False)


def test_the_model_is_sent_with_every_request() -> None:
    bodies: list[dict[str, Any]] = []

    def answer(path: str, body: dict[str, Any]) -> Made:
        bodies.append({"path": path, **body})
        return events(completion("a"))

    with false_server(answer) as url:
        assert _asked(url).text == "a"
    assert (bodies[0]["model"], bodies[0]["path"]) == (MODELS["data"][0]["id"], "/v1/completions")


@pytest.mark.parametrize(
    ("made", "status", "error"),
    [
        (Made(400, {"error": {"message": "too long"}}), 400, "too long"),
        (Made(500, b"oops"), 500, "oops"),
        (events(completion("a"), done=False), 200, "without [DONE]"),
        (events(completion("a", None)), 200, "without a finish_reason"),
        (events(completion("a", None), {"error": {"message": "died"}}, done=False), 200, "died"),
        (Made(200, b"{}", {"content-type": "text/plain"}), 200, "text/event-stream"),
        (Made(200, b"abc", {"content-length": "9", "connection": "close"}), 200, "Error"),
    ],
)
def test_an_answer_that_is_not_complete_has_an_error(made: Made, status: int, error: str) -> None:
    with false_server(lambda *_: made) as url:
        answer = _asked(url)
    assert answer.status == status
    assert answer.error is not None
    assert error in answer.error


def test_a_server_that_does_not_answer_is_given_up() -> None:
    async def ask(port: int) -> ServerAnswer:
        async with ServerClient(f"http://127.0.0.1:{port}", seconds=0.1) as client:
            return await client.ask(REQUEST)

    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts no connection
        answer = asyncio.run(ask(silent.getsockname()[1]))
    assert answer.status is None
    assert answer.error == "no complete answer within 0.1 seconds"


def test_any_content_can_be_sent() -> None:
    async def send(url: str) -> ServerAnswer:
        async with ServerClient(url) as client:
            return await client.send("completions", b"no JSON")

    with running(tiny_decoder()) as server:
        answer = asyncio.run(send(server.url))
    assert answer.status == 400
    assert answer.error is not None
    assert "valid JSON" in answer.error
