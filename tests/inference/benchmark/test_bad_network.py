"""Each fault of the proxy is what a client sees of it."""

import httpx2
import pytest
from helpers.false_server import Made, false_server

from inference.benchmark.bad_network import (
    BUSY,
    CUT,
    LOST,
    PASSED,
    REPLACED,
    UNANSWERED,
    bad_network,
)

ANSWER = {"an": "answer"}


def _asked(url: str, fault: str) -> tuple[httpx2.Response | Exception, int]:
    """Return what a client gets, and the number of requests that have reached the server."""
    seen: list[str] = []

    def answer(path: str, _body: object) -> Made:
        seen.append(path)
        return Made(body=ANSWER)

    with (
        false_server(answer) as server,
        bad_network(server.removesuffix("/v1"), lambda *_: fault) as network,
    ):
        try:
            return httpx2.post(f"{network.url}/{url}", json={}), len(seen)
        except httpx2.HTTPError as error:
            return error, len(seen)


def test_a_request_passes() -> None:
    found, num_seen = _asked("some/path", PASSED)
    assert isinstance(found, httpx2.Response)
    assert (found.status_code, found.json(), num_seen) == (200, ANSWER, 1)


@pytest.mark.parametrize(("fault", "status"), [(BUSY, 503), (REPLACED, 200)])
def test_something_else_answers(fault: str, status: int) -> None:
    found, num_seen = _asked("some/path", fault)
    assert isinstance(found, httpx2.Response)
    assert (found.status_code, num_seen) == (status, int(fault == REPLACED))
    assert b"answer" not in found.content


@pytest.mark.parametrize(("fault", "num_seen"), [(LOST, 0), (UNANSWERED, 1), (CUT, 1)])
def test_no_answer_arrives(fault: str, num_seen: int) -> None:
    found, seen = _asked("some/path", fault)
    assert isinstance(found, httpx2.RemoteProtocolError)
    assert seen == num_seen


def test_a_server_that_has_ended_gives_no_answer(capfd: pytest.CaptureFixture[str]) -> None:
    with (
        bad_network("http://127.0.0.1:1", lambda *_: PASSED) as network,
        pytest.raises(httpx2.RemoteProtocolError),
    ):
        httpx2.get(network.url)
    assert "Traceback" not in capfd.readouterr().err
