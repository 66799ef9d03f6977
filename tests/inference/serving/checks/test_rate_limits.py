"""Rates of requests and tokens, with a clock of the test and over a socket."""

from pathlib import Path
from typing import Any

import httpx2
import pytest
from helpers.serving import MODEL, running, tiny_decoder

from inference.serving.api_error import ApiError
from inference.serving.checks.keys import new_key
from inference.serving.checks.rate_limits import FailureLimit, RateLimit, TokenBucket


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_units_come_back_at_a_constant_rate() -> None:
    clock = Clock()
    bucket = TokenBucket(30.0, clock)
    bucket.take(30.0)
    assert bucket.seconds_until(1.0) == pytest.approx(2.0)
    clock.now += 1.5
    assert bucket.level == pytest.approx(0.75)
    clock.now += 1e6
    assert bucket.level == 30.0


def test_more_units_can_be_taken_than_there_are() -> None:
    clock = Clock()
    bucket = TokenBucket(60.0, clock)
    bucket.take(90.0)
    assert bucket.level == -30.0
    assert bucket.seconds_until(1.0) == pytest.approx(31.0)


def test_a_rate_may_be_less_than_one_in_a_minute() -> None:
    clock = Clock()
    limit = RateLimit(0.5, None, clock)
    limit.begin()
    with pytest.raises(ApiError, match="requests in a minute") as info:
        limit.begin()
    assert info.value.headers == {"retry-after": "120"}
    clock.now += 120.0
    limit.begin()


def test_parts_of_a_text_count_as_tokens_but_not_as_requests() -> None:
    limit = RateLimit(1.0, 10.0, Clock())
    limit.begin()
    for _ in range(3):
        limit.check_tokens()
    limit.count_tokens(10)
    with pytest.raises(ApiError, match="too many tokens"):
        limit.check_tokens()


def test_tokens_count_when_they_are_known() -> None:
    clock = Clock()
    limit = RateLimit(None, 100.0, clock)
    limit.begin()
    limit.count_tokens(150)
    with pytest.raises(ApiError, match="tokens in a minute") as info:
        limit.begin()
    assert info.value.headers == {"retry-after": "31"}
    clock.now += 31.0
    limit.begin()


def test_a_refused_request_is_not_counted() -> None:
    clock = Clock()
    limit = RateLimit(1.0, None, clock)
    limit.begin()
    for _ in range(5):
        with pytest.raises(ApiError):
            limit.begin()
    clock.now += 60.0
    limit.begin()


def test_failures_are_counted_by_address() -> None:
    clock = Clock()
    limit = FailureLimit(2.0, clock)
    for _ in range(2):
        limit.check("192.0.2.1")
        limit.count("192.0.2.1")
    with pytest.raises(ApiError, match="wrong key"):
        limit.check("192.0.2.1")
    limit.check("192.0.2.2")
    clock.now += 30.0
    limit.check("192.0.2.1")


def test_the_number_of_addresses_is_limited() -> None:
    limit = FailureLimit(1.0, Clock())
    for number in range(10_010):
        limit.count(str(number))
    assert len(limit._buckets) == 10_000
    limit.check("0")
    with pytest.raises(ApiError):
        limit.check("10009")


def test_each_key_has_its_own_rates(tmp_path: Path) -> None:
    (first, hash_1), (second, hash_2) = new_key(), new_key()
    path = tmp_path / "keys.yaml"
    path.write_text(
        "keys:\n"
        f"  alice: {{sha256: {hash_1}, requests_per_minute: 2.5}}\n"
        f"  bob: {{sha256: {hash_2}, tokens_per_minute: 10.5}}\n"
    )
    path.chmod(0o600)
    body = {"model": MODEL, "prompt": "def", "max_tokens": 8, "temperature": 0}
    with running(tiny_decoder(), keys_file=path, tokens_per_minute=1e6) as server:

        def status(key: str, path: str = "completions", **fields: Any) -> int:
            found = httpx2.post(
                f"{server.url}/{path}",
                json={**body, **fields},
                headers={"authorization": f"Bearer {key}"},
            )
            if found.status_code == 429:
                assert int(found.headers["retry-after"]) >= 1
                assert found.json()["error"]["code"] == "rate_limit_exceeded"
            return found.status_code

        assert [status(first) for _ in range(3)] == [200, 200, 429]
        assert [status(second) for _ in range(3)] == [200, 429, 429]
        # Neither the body nor the prompt is looked at.
        assert status(first, prompt=[], nonsense=1) == 429
        assert status(second, "chat/completions") == 429


def test_without_keys_all_requests_share_a_rate() -> None:
    body = {"model": MODEL, "prompt": "def", "max_tokens": 2, "stream": True}
    with running(tiny_decoder(), requests_per_minute=1.0) as server:
        found = [httpx2.post(f"{server.url}/completions", json=body) for _ in range(2)]
        assert [own.status_code for own in found] == [200, 429]
        assert httpx2.get(f"{server.url}/models").status_code == 200
