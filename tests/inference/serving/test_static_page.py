"""The files of the playground over HTTP: types, caching, security, and no foreign origin."""

import gzip
import re
import urllib.error
import urllib.request
from email.message import Message
from importlib.resources import files
from typing import NamedTuple

import httpx2
import pytest
from helpers.serving import MODEL, Running, running, tiny_decoder

from inference.serving.static_page import page_files

KEY = "a-key-of-the-tests"
PATHS = sorted(page_files())
TEXTS = {path: file.content.decode() for path, file in page_files().items()}


class _Answer(NamedTuple):
    status: int
    headers: Message
    body: bytes


def _get(server: Running, path: str, method: str = "GET", **headers: str) -> _Answer:
    own = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(server.root + path, headers=own, method=method)
    try:
        with urllib.request.urlopen(request) as response:
            return _Answer(response.status, response.headers, response.read())
    except urllib.error.HTTPError as error:
        with error:
            return _Answer(error.code, error.headers, error.read())


def test_the_package_contains_all_files_of_the_page() -> None:
    names = {file.name for file in (files("inference.serving") / "playground").iterdir()}
    assert "index.html" in names
    assert len(names) == len(PATHS)
    for name in re.findall(r'(?:href|src)="(playground/[^"]+)"', TEXTS["/"]):
        assert f"/{name}" in PATHS
    for path in PATHS:
        for name in re.findall(r'from "\./([^"]+)"', TEXTS[path]):
            assert f"/playground/{name}" in PATHS


@pytest.mark.parametrize("path", PATHS)
def test_files_have_types_that_browsers_accept_and_are_not_guessed(
    server: Running, path: str
) -> None:
    types = {
        "": "text/html; charset=utf-8",
        "css": "text/css; charset=utf-8",
        "js": "text/javascript; charset=utf-8",
        "svg": "image/svg+xml",
    }
    found = _get(server, path)
    assert found.status == 200
    assert found.headers["content-type"] == types[path.rpartition(".")[2].strip("/")]
    assert found.headers["x-content-type-options"] == "nosniff"
    assert found.body == page_files()[path].content
    assert int(found.headers["content-length"]) == len(found.body)
    assert _get(server, path, "HEAD").body == b""


def test_a_strict_policy_forbids_everything_else(server: Running) -> None:
    headers = _get(server, "/").headers
    parts = (part.strip().partition(" ") for part in headers["content-security-policy"].split(";"))
    policy = {name: value for name, _, value in parts}
    assert policy["default-src"] == "'none'"
    assert {policy[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
    assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-frame-options"] == "DENY"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["access-control-allow-origin"] is None
    assert headers["set-cookie"] is None


def test_a_file_that_has_not_changed_is_not_sent_again(server: Running) -> None:
    first = _get(server, "/playground/main.js")
    assert first.headers["cache-control"] == "no-cache"
    etag = first.headers["etag"]
    assert etag.startswith("W/")  # the same for a compressed file
    for known in (etag, f'"other", {etag}', etag.removeprefix("W/")):
        again = _get(server, "/playground/main.js", if_none_match=known)
        assert (again.status, again.body, again.headers["etag"]) == (304, b"", etag)
        assert again.headers["content-security-policy"]
    assert _get(server, "/playground/main.js", if_none_match='"other"').status == 200
    assert len({_get(server, path).headers["etag"] for path in PATHS}) == len(PATHS)


def test_files_are_compressed_on_request(server: Running) -> None:
    whole = _get(server, "/playground/main.js")
    assert whole.headers["content-encoding"] is None
    found = _get(server, "/playground/main.js", accept_encoding="br, gzip")
    assert found.headers["content-encoding"] == "gzip"
    assert int(found.headers["content-length"]) == len(found.body) < len(whole.body) / 2
    assert gzip.decompress(found.body) == whole.body
    assert "Accept-Encoding" in found.headers["vary"]
    for name in ("etag", "content-security-policy", "x-content-type-options"):
        assert found.headers[name] == whole.headers[name]
    etag = found.headers["etag"]
    again = _get(server, "/playground/main.js", accept_encoding="gzip", if_none_match=etag)
    assert (again.status, again.body) == (304, b"")


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_not_compressed(server: Running, stream: bool) -> None:
    body = {"model": MODEL, "prompt": "def", "max_tokens": 64, "stream": stream}
    headers = {"accept-encoding": "gzip"}
    found = httpx2.post(f"{server.url}/completions", json=body, headers=headers)
    assert found.status_code == 200
    assert "content-encoding" not in found.headers
    assert len(found.content) > 500  # smaller files are not compressed either


@pytest.mark.parametrize(
    "path",
    [
        "/playground",
        "/playground/",
        "/playground/missing.js",
        "/playground/../app.py",
        "/playground/..%2fapp.py",
        "/playground/index.html",
        "/index.html",
    ],
)
def test_nothing_else_is_served(server: Running, path: str) -> None:
    assert _get(server, path).status == 404


def test_the_page_cannot_be_written(server: Running) -> None:
    assert _get(server, "/", "POST").status == 405


def test_the_page_needs_no_key_and_the_interface_does() -> None:
    with running(tiny_decoder(), api_keys=(KEY,)) as server:
        assert {_get(server, path).status for path in PATHS} == {200}
        assert _get(server, "/v1/models").status == 401
        assert _get(server, "/playground/missing.js").status == 401
        assert _get(server, "/v1/models", authorization=f"Bearer {KEY}").status == 200


def test_a_server_without_a_playground_has_no_page() -> None:
    with running(tiny_decoder(), playground=False) as server:
        assert {_get(server, path).status for path in PATHS} == {404}


@pytest.mark.parametrize("path", PATHS)
def test_no_file_names_a_foreign_origin(path: str) -> None:
    known = {"http://www.w3.org/2000/svg"}  # a name of XML, which is never requested
    assert set(re.findall(r"""(?:[a-z]+:)?//[^\s"'`)]+""", _without_comments(path))) <= known
    assert "@import" not in TEXTS[path]


def _without_comments(path: str) -> str:
    return re.sub(r"(?m)^\s*//.*$|\s// .*$", "", TEXTS[path])


def test_no_text_can_become_markup_or_code() -> None:
    pattern = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function"
    storage = r"localStorage|sessionStorage|indexedDB|document\.cookie"
    for path in PATHS:
        assert not re.search(f"{pattern}|{storage}", TEXTS[path])
    page = TEXTS["/"]
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son[a-z]+=", page)


def test_the_page_is_small() -> None:
    assert sum(len(file.content) for file in page_files().values()) < 100_000
