"""A client of a real server, and of false ones that behave badly."""

import socket
import time
from typing import Any

import pytest
from helpers.false_server import MODELS, Made, completion, false_server
from helpers.serving import MODEL, running, tiny_decoder

from inference.client import ServerClient, seconds_to_wait
from jakiro.errors import ConfigError, JakiroError, ResourceError

KEY = "secret-key-1"


def _connected(url: str, model: str | None = None, key: str | None = None) -> ServerClient:
    client = ServerClient(url, key)
    try:
        client.connect(model)
    except JakiroError:
        client.close()
        raise
    return client


def test_texts_of_a_server_are_those_of_its_decoder() -> None:
    decoder = tiny_decoder(trained=True)
    expected = decoder.generate("def main(", temperature=0, max_new_tokens=12)
    with running(decoder, api_keys=(KEY,)) as server:
        client = _connected(server.root, key=KEY)
        assert client.model == MODEL
        answer = client.ask("def main(", max_tokens=12, temperature=0.0)
        assert (answer.text, answer.finish_reason) == (expected.text, "length")
        assert answer.accepted is not None
        messages = [{"role": "user", "content": "Why?"}]
        chat = client.ask(messages, max_tokens=3, temperature=0.0)
        assert chat.finish_reason == "length"
        client.close()
        with pytest.raises(ConfigError, match=r"refuses the API key.*no key.*JAKIRO_API_KEY"):
            _connected(server.url)
        with pytest.raises(ConfigError, match="does not have this model"):
            _connected(server.url, "tinny", KEY)


def test_a_server_that_cannot_be_reached_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(ResourceError, match=rf"cannot reach .*:{port}/v1.*start the server"):
        _connected(f"http://127.0.0.1:{port}")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host/v1", "http://[::1", ""])
def test_a_text_that_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="URL is not the address"):
        ServerClient(url)


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (Made(404, {"detail": "Not Found"}), "no interface like OpenAI's"),
        (Made(200, b"<html>"), "no interface like OpenAI's"),
        (Made(200, {"data": [{"id": "a"}, {"id": "b"}]}), "one of a, b.*--model"),
    ],
)
def test_other_servers_are_refused(models: Made, message: str) -> None:
    with (
        false_server(lambda *_: Made(), models) as url,
        pytest.raises(ConfigError, match=message),
    ):
        _connected(url)


@pytest.mark.parametrize(
    "made", [Made(400, {"error": {"message": "too long"}}), Made(500, b"oops"), Made(200, b"{}")]
)
def test_an_answer_that_is_not_complete_is_an_error(made: Made) -> None:
    with false_server(lambda *_: made) as url:
        client = _connected(url)
        with pytest.raises(ResourceError, match=f"status {made.status}"):
            client.ask("a", max_tokens=1)
        client.close()


def test_a_refused_request_is_sent_again_after_the_time_in_the_header() -> None:
    times: list[float] = []

    def answer(_: str, body: dict[str, Any]) -> Made:
        assert body["model"] == MODELS["data"][0]["id"]
        times.append(time.monotonic())
        if len(times) < 3:
            return Made(429, {"error": {"message": "busy"}}, {"retry-after": "0.1"})
        return Made(body=completion(body["prompt"]))

    with false_server(answer) as url:
        client = _connected(url)
        assert client.ask("Once", max_tokens=4).text == "Once"
        client.close()
    assert times[2] - times[0] >= 0.2


def test_the_header_is_a_number_of_seconds() -> None:
    headers = ("0.5", "-2", None, "soon")
    assert [seconds_to_wait(header) for header in headers] == [0.5, 0.0, 1.0, 1.0]
