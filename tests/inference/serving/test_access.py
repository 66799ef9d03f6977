"""Foreign hosts, foreign web pages, wrong keys, and bodies that are too large."""

import hmac
from hashlib import sha256
from pathlib import Path

import httpx2
import pytest
from helpers.serving import Running, running, tiny_decoder

from inference.serving.access import EVERYONE, ApiKeys
from jakiro.errors import ConfigError

KEY, OTHER = "secret-key-1", "secret-key-2"


def _status(server: Running, host: str) -> int:
    return httpx2.get(f"{server.root}/health", headers={"host": host}).status_code


def test_only_names_of_this_machine_are_accepted(server: Running) -> None:
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:99"):
        assert _status(server, host) == 200
    for host in ("evil.example", "localhost.evil.example:80", "10.0.0.1", "["):
        assert _status(server, host) == 400
    with running(tiny_decoder(), allowed_hosts=("api.example.org",)) as named:
        assert _status(named, "API.example.org:443") == _status(named, "127.0.0.1:80") == 200
        assert _status(named, "other.example.org") == 400


@pytest.mark.parametrize("origin", ["https://evil.example", "null"])
def test_other_web_pages_are_refused(server: Running, origin: str) -> None:
    for method in ("GET", "OPTIONS"):
        answer = httpx2.request(method, f"{server.url}/models", headers={"origin": origin})
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "wrong_origin"
    own = httpx2.get(f"{server.url}/models", headers={"origin": server.root})
    assert own.status_code == 200
    assert "access-control-allow-origin" not in own.headers


def test_keys_and_allowed_origins(caplog: pytest.LogCaptureFixture) -> None:
    origin = "https://app.example"
    with running(tiny_decoder(), api_keys=(KEY,), allowed_origins=(origin,)) as server:
        messages = set()
        for key in ("", "Bearer wrong-key", f"Bearer {KEY}x", f"Basic {KEY}"):
            for path in ("/v1/models", "/metrics", "/v1/nothing"):
                found = httpx2.get(server.root + path, headers={"authorization": key})
                assert (found.status_code, found.headers["www-authenticate"]) == (401, "Bearer")
                messages.add(found.text)
        assert len(messages) == 1
        assert httpx2.get(f"{server.root}/health").json()["ready"] is True
        headers = {"authorization": f"Bearer {KEY}", "origin": origin}
        allowed = httpx2.get(f"{server.url}/models", headers=headers)
        assert allowed.headers["access-control-allow-origin"] == origin
        asks = {"origin": origin, "access-control-request-method": "DELETE"}
        assert httpx2.options(f"{server.url}/completions", headers=asks).status_code == 200
        foreign = {**headers, "origin": "https://other.example"}
        assert httpx2.get(f"{server.url}/models", headers=foreign).status_code == 403
    assert KEY not in caplog.text + messages.pop()


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []

    def counted(first: bytes, second: bytes) -> bool:
        lengths.append((len(first), len(second)))
        return first == second

    keys = ApiKeys([KEY, OTHER])
    monkeypatch.setattr(hmac, "compare_digest", counted)
    for sent, user in (("", None), (f"bearer {OTHER}", "key 2"), ("Bearer \xff" * 999, None)):
        lengths.clear()
        assert keys.user_of(sent) == user
        assert lengths == [(64, 64)] * 2
    assert ApiKeys().user_of("") == EVERYONE


def test_a_file_has_the_hashes_of_named_keys(tmp_path: Path) -> None:
    path, known = tmp_path / "keys.yaml", sha256(KEY.encode()).hexdigest()
    path.write_text(f"keys:\n  alice: {known}\n")
    keys = ApiKeys([OTHER], path)
    assert keys.are_several
    assert keys.user_of(f"Bearer {KEY}") == "alice"
    assert keys.user_of(f"Bearer {OTHER}") == "key 1"
    assert keys.user_of(f"Bearer {known}") is None
    path.write_text("keys: {alice: my-own-key}")
    with pytest.raises(ConfigError, match="64") as info:
        ApiKeys(file=path)
    assert "my-own-key" not in str(info.value)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_large_body_is_refused(server: Running, is_chunked: bool) -> None:
    content = iter([b" " * 100_000] * 50) if is_chunked else b" " * 5_000_000
    found = httpx2.post(f"{server.url}/completions", content=content)
    assert (found.status_code, found.json()["error"]["code"]) == (413, "body_too_large")
