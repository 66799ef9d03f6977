"""The id of each request, and its line in the log."""

import logging

import httpx2
import pytest
from helpers.raw_http import wait_until
from helpers.serving import MODEL, Running, running, tiny_decoder


def test_requests_have_ids(server: Running) -> None:
    sent = httpx2.get(f"{server.url}/models", headers={"x-request-id": "my-request-1"})
    assert sent.headers["x-request-id"] == "my-request-1"
    other = httpx2.get(f"{server.url}/models", headers={"x-request-id": "bad id\x07"[:6]})
    assert len(other.headers["x-request-id"]) == 32


def test_each_request_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with running(tiny_decoder(), api_keys=("secret-key-1",)) as server:
        for key, path, words in (
            ("secret-key-1", "/v1/models", "key 1 /v1/models 200 in "),
            ("other", "/v1/models", "- /v1/models 401 in "),
            ("secret-key-1", "/private", "key 1 other 404 in "),
        ):
            headers = {"authorization": f"Bearer {key}"}
            found = httpx2.get(server.root + path, headers=headers)
            sent = found.headers["x-request-id"]
            wait_until(lambda sent=sent: any(sent in text for text in caplog.messages))
            (line,) = [text for text in caplog.messages if sent in text]
            assert words in line


@pytest.mark.parametrize("stream", [False, True])
def test_the_line_has_the_numbers_of_tokens(
    server: Running, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    caplog.set_level(logging.INFO)
    body = {
        "model": MODEL,
        "prompt": [5, 6, 7],
        "max_tokens": 9,
        "temperature": 0,
        "stream": stream,
    }
    sent = {"x-request-id": f"count-{stream}"}
    assert httpx2.post(f"{server.url}/completions", json=body, headers=sent).status_code == 200
    wait_until(lambda: any(sent["x-request-id"] in text for text in caplog.messages))
    (line,) = [text for text in caplog.messages if sent["x-request-id"] in text]
    assert line.endswith(" s, 3 prompt tokens, 9 new tokens")
