"""The files of the playground over HTTP: types, security, and no foreign origin."""

import re
from importlib.resources import files

import httpx2
import pytest
from helpers.serving import Running, running, tiny_decoder

KEY = "a-key-of-the-tests"
TEXTS = {
    "/" if file.name == "index.html" else f"/playground/{file.name}": file.read_text()
    for file in (files("inference.serving") / "playground").iterdir()
}


def _get(server: Running, path: str, **headers: str) -> httpx2.Response:
    return httpx2.get(server.root + path, headers=headers)


@pytest.mark.parametrize("path", TEXTS)
def test_files_have_types_that_browsers_accept(server: Running, path: str) -> None:
    types = {"": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    found = _get(server, path)
    assert (found.status_code, found.text) == (200, TEXTS[path])
    assert found.headers["content-type"].startswith(types[path.rpartition(".")[2].strip("/")])
    assert found.headers["x-content-type-options"] == "nosniff"
    again = _get(server, path, **{"if-none-match": found.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_a_strict_policy_forbids_everything_else(server: Running) -> None:
    headers = _get(server, "/").headers
    parts = (part.strip().partition(" ") for part in headers["content-security-policy"].split(";"))
    policy = {name: value for name, _, value in parts}
    assert policy["default-src"] == "'none'"
    assert {policy[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
    assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in headers["content-security-policy"]


@pytest.mark.parametrize("path", ["/playground/missing.js", "/playground/..%2fapp.py", "/x.html"])
def test_nothing_else_is_served(server: Running, path: str) -> None:
    assert _get(server, path).status_code == 404


def test_the_page_needs_no_key_and_the_interface_does() -> None:
    with running(tiny_decoder(), api_keys=(KEY,)) as server:
        assert {_get(server, path).status_code for path in TEXTS} == {200}
        assert _get(server, "/v1/models").status_code == 401
        assert _get(server, "/v1/models", authorization=f"Bearer {KEY}").status_code == 200
    with running(tiny_decoder(), playground=False) as server:
        assert {_get(server, path).status_code for path in TEXTS} == {404}


@pytest.mark.parametrize("path", TEXTS)
def test_no_file_names_a_foreign_origin_or_writes_markup(path: str) -> None:
    known = {"http://www.w3.org/2000/svg"}  # a name of XML, which is never requested
    text = re.sub(r"(?m)^\s*//.*$|\s// .*$", "", TEXTS[path])
    assert set(re.findall(r"""(?:[a-z]+:)?//[^\s"'`)]+""", text)) <= known
    assert "@import" not in text
    pattern = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function"
    storage = r"localStorage|sessionStorage|indexedDB|document\.cookie"
    assert not re.search(f"{pattern}|{storage}", text)
