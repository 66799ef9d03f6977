"""Foreign hosts, foreign web pages, and wrong keys."""

from pathlib import Path

import httpx2
import pytest
from helpers.raw_http import asked, head_of
from helpers.serving import Running, running, tiny_decoder

KEY = "secret-key-1"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:99", "::1"])
def test_names_of_this_machine_are_accepted(server: Running, host: str) -> None:
    if host == "::1":  # not the form of a header
        host = "[::1]"
    answer = asked(server.address, head_of("/health", host=host, connection="close"))
    assert answer.status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", "["]
)
def test_other_names_are_refused(server: Running, host: str) -> None:
    for path in ("/health", "/v1/models", "/metrics", "/nothing"):
        answer = asked(server.address, head_of(path, host=host, connection="close"))
        assert answer.status == 421
        assert answer.error["code"] == "wrong_host"
        assert "--allowed-host" in answer.error["message"]


def test_other_names_can_be_allowed() -> None:
    with running(tiny_decoder(), allowed_hosts=("api.example.org",)) as server:
        names = {"API.example.org:443": 200, "other.example.org": 421, "127.0.0.1:80": 200}
        for host, status in names.items():
            answer = asked(server.address, head_of("/health", host=host, connection="close"))
            assert answer.status == status
    with running(tiny_decoder(), allowed_hosts=("*",)) as server:
        assert asked(server.address, head_of("/health", host="x", connection="close")).status == 200


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "file://", "http://localhost:1"]
)
def test_other_web_pages_are_refused(server: Running, origin: str) -> None:
    for method, path in (
        ("GET", "/v1/models"),
        ("POST", "/v1/completions"),
        ("OPTIONS", "/v1/models"),
    ):
        url = f"{server.url}/{path}"
        answer = httpx2.request(method, url, headers={"origin": origin}, content=b"")
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "wrong_origin"
        assert "access-control-allow-origin" not in answer.headers


def test_pages_of_the_server_itself_are_accepted(server: Running) -> None:
    found = httpx2.get(f"{server.url}/models", headers={"origin": server.root})
    assert found.status_code == 200


def test_credentials_are_not_shared_with_all_origins() -> None:
    with running(tiny_decoder(), allowed_origins=("*",)) as server:
        found = httpx2.get(f"{server.url}/models", headers={"origin": "https://any.example"})
        assert found.status_code == 200
        assert found.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in found.headers


def test_too_many_wrong_keys_are_refused() -> None:
    with running(tiny_decoder(), api_keys=(KEY,), failures_per_minute=2.5) as server:

        def status(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            found = httpx2.get(f"{server.url}/models", headers=headers)
            assert ("retry-after" in found.headers) is (found.status_code == 429)
            return found.status_code

        assert [status("wrong-key") for _ in range(3)] == [401, 401, 429]
        assert status(KEY) == 429
        assert httpx2.get(f"{server.root}/health").status_code == 200


def test_a_file_of_keys(tmp_path: Path) -> None:
    from inference.serving.checks.keys import new_key

    key, digest = new_key()
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys:\n  alice: {{sha256: {digest}}}\n")
    path.chmod(0o600)
    with running(tiny_decoder(), keys_file=path) as server:
        for own, status in ((key, 200), (digest, 401), (KEY, 401)):
            headers = {"authorization": f"Bearer {own}"}
            assert httpx2.get(f"{server.url}/models", headers=headers).status_code == status
