"""The playground: a page at `/`, whose files are part of the package."""

from typing import Any

from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

_FOLDER = ("inference.serving", "playground")
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
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class _Page(StaticFiles):
    """Files with the headers of the page."""

    def file_response(self, *args: Any, **options: Any) -> Response:
        """Return the response with a file."""
        response = super().file_response(*args, **options)
        response.headers.update(_HEADERS)
        return response


def page_routes() -> list[BaseRoute]:
    """Return the routes of the page."""
    page = _Page(packages=[_FOLDER], html=True)
    return [Route("/", page), Mount("/playground", _Page(packages=[_FOLDER]))]
