"""The playground: a page at `/` whose files are part of the package."""

from functools import partial
from hashlib import sha256
from importlib.resources import files
from typing import NamedTuple

from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = "playground"
_PAGE = "index.html"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # Text of a model can then never become markup, whatever the scripts do.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "cache-control": "no-cache",  # files may be stored, but must be compared by their ETag
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class StaticFile(NamedTuple):
    """A file of the page."""

    content: bytes
    media_type: str

    @property
    def etag(self) -> str:
        """The identifier of the content in HTTP; it is weak, because files may be compressed."""
        return f'W/"{sha256(self.content).hexdigest()[:32]}"'


def page_files() -> dict[str, StaticFile]:
    """Return the files of the page, by the path at which they are served."""
    folder = files("inference.serving") / _FOLDER
    found = {}
    for file in folder.iterdir():
        ending = file.name.rpartition(".")[2]
        if ending in _TYPES:
            path = "/" if file.name == _PAGE else f"/{_FOLDER}/{file.name}"
            found[path] = StaticFile(file.read_bytes(), _TYPES[ending])
    return found


def page_routes() -> list[Route]:
    """Return the routes of the page, which need no key: a browser that opens a page sends none."""
    # Only the files are compressed: the events of a stream must not wait for one another.
    compressed = [Middleware(GZipMiddleware)]
    return [
        Route(path, partial(_serve, file), methods=["GET"], middleware=compressed)
        for path, file in page_files().items()
    ]


async def _serve(file: StaticFile, request: HttpRequest) -> Response:
    headers = {**_HEADERS, "etag": file.etag}
    known = request.headers.get("if-none-match", "")
    if file.etag.removeprefix("W/") in known.replace("W/", "").replace(" ", "").split(","):
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)
