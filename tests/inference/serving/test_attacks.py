"""Hostile bodies and cut streams neither hurt the server nor appear in its log."""

import json
import logging
from typing import Any

import httpx2
import pytest
from helpers.raw_http import posted
from helpers.serving import MODEL, Running

BODY: dict[str, Any] = {"model": MODEL, "prompt": "def", "max_tokens": 4, "temperature": 0}


@pytest.mark.parametrize(
    "fields",
    [
        '"prompt":[' + ",".join(["1.5"] * 250_000) + "]",
        '"prompt":' + "[" * 500_000,
        '"prompt":"a",' + ",".join(f'"k{n}":1' for n in range(80_000)),
        '"prompt":"a","max_tokens":' + "9" * 5000,
        '"prompt":"a","temperature":1e999999',
        '"prompt":"a","logit_bias":{"1":Infinity}',
        '"prompt":"\\ud800"',
        '"prompt":""',
        '"prompt":no JSON',
    ],
    ids=lambda text: f"{text[:30]} ({len(text)})",
)
def test_hostile_bodies_are_refused(server: Running, fields: str) -> None:
    answer = httpx2.post(f"{server.url}/completions", content=f'{{"model":"{MODEL}",{fields}}}')
    assert answer.status_code == 400
    assert len(answer.content) < 1000


def test_streams_that_are_cut_free_their_places(server: Running) -> None:
    body = json.dumps({**BODY, "max_tokens": 200, "stream": True, "temperature": 1}).encode()
    for size in (0, 1, 300, 3000):
        with posted(server.address, "/v1/completions", body) as connection:
            received = 0
            while received < size:
                received += len(connection.recv(100))
    assert httpx2.post(f"{server.url}/completions", json=BODY).status_code == 200
    server.wait_until_idle()


def test_nothing_that_clients_send_is_logged(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    canary = "canary-2c91"
    caplog.set_level(logging.DEBUG, "jakiro")
    for prompt in (canary, [canary, 1]):
        fields = {**BODY, "prompt": prompt, "user": canary}
        httpx2.post(f"{server.url}/completions", json=fields)
    httpx2.get(f"{server.root}/{canary}?{canary}", headers={"x-api-key": canary})
    texts = [record.getMessage() for record in caplog.records if record.name.startswith("jakiro")]
    assert not [text for text in texts if canary in text]
