"""Devices that open sessions and submit trees, over a real socket."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import httpx2
import pytest
from helpers.remote import looked_up
from helpers.serving import MODEL, SECONDS, Running, running, tiny_decoder

from inference import SpeculativeDecoder
from inference.remote.messages import (
    OpenSession,
    Progress,
    SessionOpened,
    Verdict,
    parse_message,
)

PROMPT = [5, 6, 7, 5, 6, 7, 5]
KEYS = ("the first key", "the second key")
GREEDY: dict[str, Any] = {"seed": 3, "max_tokens": 24, "temperature": 0.0}


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return tiny_decoder()


@pytest.fixture(scope="module")
def server(decoder: SpeculativeDecoder) -> Iterator[Running]:
    with running(decoder, remote_sessions=4, api_keys=KEYS, playground=False) as found:
        yield found


class Device:
    """A client of the routes, which never repeats anything by itself."""

    def __init__(self, server: Running, key: str | None = KEYS[0]) -> None:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self.http = httpx2.Client(base_url=f"{server.url}/", headers=headers, timeout=SECONDS)

    def open(self, **fields: Any) -> SessionOpened:
        request = OpenSession(**{"prompt": PROMPT, **GREEDY, **fields})
        response = self.http.post("verify/sessions", content=request.model_dump_json())
        assert response.status_code == 201, response.text
        return parse_message(response.content, SessionOpened)

    def put(self, session: str, step: object, body: bytes) -> httpx2.Response:
        return self.http.put(f"verify/sessions/{session}/steps/{step}", content=body)

    def submit(self, opened: SessionOpened, step: int, known: list[int]) -> Verdict:
        response = self.put(opened.session, step, looked_up(known).body)
        assert response.status_code == 200, response.text
        return parse_message(response.content, Verdict)

    def close(self, session: str) -> int:
        return self.http.delete(f"verify/sessions/{session}").status_code


@pytest.fixture
def device(server: Running) -> Iterator[Device]:
    found = Device(server)
    with found.http:
        yield found


@pytest.fixture
def opened(device: Device) -> Iterator[SessionOpened]:
    found = device.open()
    yield found
    device.close(found.session)


def _error(response: httpx2.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() >= {"message", "type", "param", "code"}
    return error


def test_a_repeated_step_gets_the_stored_verdict_byte_for_byte(
    device: Device, opened: SessionOpened
) -> None:
    tree = looked_up([*PROMPT, *opened.emitted]).body
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: device.put(opened.session, 1, tree), range(3)))
    answers.append(device.put(opened.session, 1, tree))
    assert {answer.content for answer in answers} == {answers[0].content}


def test_a_foreign_session_looks_like_an_unknown_one(
    server: Running, device: Device, opened: SessionOpened
) -> None:
    other = Device(server, KEYS[1])
    tree = looked_up([*PROMPT, *opened.emitted]).body
    with other.http:
        foreign = other.put(opened.session, 1, tree)
        unknown = other.put("a" * 22, 1, tree)
        assert foreign.status_code == unknown.status_code == 410
        assert foreign.content == unknown.content
        answer = other.http.get(f"verify/sessions/{opened.session}/memory?from=0&to=1")
        assert answer.content == foreign.content
        assert other.close(opened.session) == 410
    assert device.submit(opened, 1, [*PROMPT, *opened.emitted]).step == 1


def test_a_closed_session_is_gone_and_its_text_goes_on_in_another(
    device: Device, decoder: SpeculativeDecoder
) -> None:
    first = device.open()
    verdict = device.submit(first, 1, [*PROMPT, *first.emitted])
    assert device.close(first.session) == 204
    tree = looked_up([*PROMPT, *first.emitted]).body
    answers = [
        device.put(first.session, 1, tree),
        device.http.get(f"verify/sessions/{first.session}/memory?from=0&to=1"),
    ]
    assert {answer.status_code for answer in answers} == {410}
    emitted = [*first.emitted, *verdict.emitted]
    second = device.open(resume=Progress(emitted=emitted, next_step=2))
    assert (second.emitted, second.next_step) == (emitted, 2)
    assert second.text == first.text + verdict.text
    alone = decoder.generate(PROMPT, max_new_tokens=24, temperature=0).new_token_ids
    new = device.submit(second, 2, [*PROMPT, *emitted]).emitted
    assert [*emitted, *new] == alone[: len(emitted) + len(new)]
    device.close(second.session)


def test_a_repeated_opening_gets_the_same_session(device: Device) -> None:
    text_id = "ab" * 16
    first, *others = [device.open(text_id=text_id) for _ in range(3)]
    assert others == [first, first]
    verdict = device.submit(first, 1, [*PROMPT, *first.emitted])
    again = device.open(text_id=text_id)  # as after a verdict that was lost
    assert device.submit(again, 1, [*PROMPT, *again.emitted]) == verdict
    device.close(again.session)


def test_a_prompt_is_read_on_while_the_device_is_away(server: Running, device: Device) -> None:
    def num_read() -> float:
        page = device.http.get(f"{server.root}/metrics").text
        (line,) = (own for own in page.splitlines() if 'tokens_total{kind="prompt"}' in own)
        return float(line.split()[1])

    before, released = num_read(), Event()
    request = OpenSession(prompt=PROMPT, text_id="cd" * 16, **GREEDY)
    server.server.engine.call(lambda: released.wait(SECONDS))
    for _ in range(3):
        with pytest.raises(httpx2.ReadTimeout):
            device.http.post("verify/sessions", content=request.model_dump_json(), timeout=0.3)
    released.set()
    opened = device.open(text_id=request.text_id)
    assert num_read() == before + len(PROMPT)
    assert device.submit(opened, 1, [*PROMPT, *opened.emitted]).step == 1
    device.close(opened.session)


def test_another_session_of_a_text_ends_the_first_one(device: Device) -> None:
    text_id = "ab" * 16
    # More than are allowed.
    sessions = [device.open(text_id=text_id, seed=seed).session for seed in range(5)]
    codes = [device.put(own, 1, b"").status_code for own in sessions]
    assert codes == [410] * 4 + [400]
    device.close(sessions[-1])


def test_the_number_of_sessions_is_limited(device: Device) -> None:
    sessions = [device.open().session for _ in range(4)]
    request = OpenSession(prompt=PROMPT, **GREEDY).model_dump_json()
    refused = device.http.post("verify/sessions", content=request)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
    assert [device.close(session) for session in sessions] == [204] * 4


WRONG: list[dict[str, Any]] = [
    {"unknown": 1},
    {"prompt": [10**6]},
    {"prompt": "word " * 2000},
    {"prompt": [{"role": "tool", "content": "x"}]},
    {"resume": {"emitted": [10**6], "next_step": 1}},
    {"resume": {"emitted": [4] * 40, "next_step": 9}},
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: str(wrong)[:40])
def test_a_session_that_cannot_be_opened_is_refused(device: Device, wrong: dict[str, Any]) -> None:
    body = json.dumps({"prompt": PROMPT, **GREEDY, **wrong})
    refused = device.http.post("verify/sessions", content=body)
    assert refused.status_code == 400
    assert _error(refused)["message"]


def test_requests_beside_a_session_keep_their_tokens(
    server: Running, device: Device, opened: SessionOpened, decoder: SpeculativeDecoder
) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "seed": 5}
    alone = decoder.generate("some words", max_new_tokens=60, **options).text

    def complete() -> str:
        with server.client(KEYS[1]) as client:
            own = client.completions.create(
                model=MODEL, prompt="some words", max_tokens=60, **options
            )
            return own.choices[0].text

    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(complete)
        known, step, is_finished = [*PROMPT, *opened.emitted], 1, False
        while not is_finished:
            verdict = device.submit(opened, step, known)
            known, step, is_finished = [*known, *verdict.emitted], step + 1, verdict.finished
        assert beside.result(SECONDS) == alone
    expected = decoder.generate(PROMPT, max_new_tokens=24, temperature=0).new_token_ids
    assert known[len(PROMPT) :] == expected


def test_the_metrics_count_steps_and_sessions(
    server: Running, device: Device, opened: SessionOpened
) -> None:
    def value(name: str) -> float:
        page = device.http.get(f"{server.root}/metrics").text
        found = [line for line in page.splitlines() if line.startswith(f"jakiro_{name} ")]
        return float(found[0].split()[1]) if found else 0.0

    names = [f'remote_steps_total{{outcome="{own}"}}' for own in ("decided", "replayed", "refused")]
    before = [value(name) for name in names]
    tree = looked_up([*PROMPT, *opened.emitted]).body
    for body in (tree, tree, b""):
        device.put(opened.session, 1, body)
    assert [value(name) for name in names] == [count + 1 for count in before]
    assert value("remote_sessions") == 1


def test_an_idle_session_is_gone(decoder: SpeculativeDecoder) -> None:
    with running(decoder, remote_sessions=1, remote_idle_seconds=0.05) as server:
        device = Device(server, None)
        with device.http:
            opened = device.open()
            request = OpenSession(prompt=PROMPT, **GREEDY).model_dump_json()
            while (again := device.http.post("verify/sessions", content=request)).is_error:
                assert again.status_code == 429
            assert device.put(opened.session, 1, b"").status_code == 410


def test_a_session_is_not_idle_while_one_of_two_requests_to_it_waits(
    decoder: SpeculativeDecoder,
) -> None:
    released, fields = Event(), {"prompt": PROMPT, "text_id": "ef" * 16, **GREEDY}
    with (
        running(decoder, remote_sessions=1, remote_idle_seconds=0.05) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        device = Device(server, None)
        with device.http:
            server.server.engine.call(lambda: released.wait(SECONDS))
            waiting = pool.submit(device.open, **fields)
            body = OpenSession(**fields).model_dump_json()
            with pytest.raises(httpx2.ReadTimeout):
                device.http.post("verify/sessions", content=body, timeout=0.2)
            time.sleep(0.2)
            released.set()
            assert waiting.result(SECONDS).emitted


def test_the_number_of_a_step_is_a_number(device: Device, opened: SessionOpened) -> None:
    for step in ("x", 5000 * "1"):
        assert device.put(opened.session, step, b"").status_code == 400


def test_no_device_is_served_unless_the_server_says_so(decoder: SpeculativeDecoder) -> None:
    with running(decoder) as server, Device(server, None).http as http:
        assert http.get("verify").status_code == 404
