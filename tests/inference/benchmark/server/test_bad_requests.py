"""Jakiro's own server refuses every bad request, and says why."""

import httpx2
from helpers.serving import MODEL, running, tiny_decoder

from inference.benchmark.server.bad_requests import bad_requests


def test_every_bad_request_is_refused() -> None:
    requests = bad_requests(MODEL)
    assert len({request.fault for request in requests}) == len(requests)
    with running(tiny_decoder()) as server:
        for request in requests:
            response = httpx2.post(f"{server.url}/{request.path}", content=request.content)
            assert response.status_code in (400, 404), request.fault
            assert response.json()["error"]["message"]
