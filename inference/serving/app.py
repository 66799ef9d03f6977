"""The routes of the server, and the checks that precede them."""

from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from inference.serving.access import HostCheck, KeyCheck, OriginCheck
from inference.serving.api_error import ApiError
from inference.serving.chat import chat
from inference.serving.completions import complete
from inference.serving.events import Disconnected
from inference.serving.forget import forget
from inference.serving.health import health, live
from inference.serving.journal import CLOSED, Journal
from inference.serving.keys import ApiKeys
from inference.serving.models import get_model, list_models
from inference.serving.rate_limits import FailureLimit
from inference.serving.remote.routes import remote_routes
from inference.serving.remote.sessions import RemoteSessions
from inference.serving.request_limits import BodyLimit, HeadLimit
from inference.serving.service import Service
from inference.serving.static_page import page_routes
from inference.serving.telemetry import CONTENT_TYPE

_ROUTES = [
    Route("/v1/completions", complete, methods=["POST"]),
    Route("/v1/chat/completions", chat, methods=["POST"]),
    Route("/v1/adaptation", forget, methods=["DELETE"]),
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{name:path}", get_model, methods=["GET"]),
]
_OPEN = {"/health", "/health/live"}  # paths that need no key, beside those of the playground
_SESSIONS = "/v1/verify/sessions"
_PATHS = {*_OPEN, "/metrics", *(route.path for route in _ROUTES if "{" not in route.path)}


def create_app(service: Service, keys: ApiKeys) -> Starlette:
    """Return the application, as uvicorn runs it.

    Args:
        service: service that answers the requests.
        keys: accepted keys.
    """
    handlers: Any = {
        ApiError: _api_error,
        HTTPException: _http_error,
        Exception: _internal_error,
        Disconnected: _disconnected,
        ClientDisconnect: _disconnected,
    }
    operations = [
        Route("/health", health),
        Route("/health/live", live),
        Route("/metrics", _metrics),
    ]
    page = page_routes() if service.settings.playground else []
    open_paths = {*_OPEN, *(route.path for route in page)}
    remote = remote_routes() if service.settings.remote_sessions else []
    paths = _PATHS | ({"/v1/verify", _SESSIONS, f"{_SESSIONS}/*"} if remote else set())
    app = Starlette(
        routes=[*_ROUTES, *remote, *operations, *page],
        middleware=_checks(service, keys, open_paths, paths),
        exception_handlers=handlers,
    )
    # A redirection from a path with a slash at its end would name `http` behind a proxy with TLS,
    # and clients would send their keys there.
    app.router.redirect_slashes = False
    app.state.service = service
    if remote:
        app.state.remote = RemoteSessions(service)
    return app


def _checks(
    service: Service, keys: ApiKeys, open_paths: set[str], paths: set[str]
) -> list[Middleware]:
    """Return all that happens to a request before its route, in this order."""
    settings = service.settings
    origins = settings.allowed_origins
    cors: dict[str, Any] = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
    failures = FailureLimit(settings.failures_per_minute)
    return [
        Middleware(Journal, service.telemetry, paths),
        Middleware(HeadLimit, settings.max_head_bytes),
        Middleware(HostCheck, settings.host, settings.allowed_hosts),
        Middleware(OriginCheck, origins),
        *([Middleware(CORSMiddleware, allow_origins=list(origins), **cors)] if origins else []),
        Middleware(KeyCheck, keys, failures, open_paths),
        Middleware(BodyLimit, settings.max_body_bytes, settings.receive_seconds),
    ]


async def _metrics(request: HttpRequest) -> Response:
    return Response(request.app.state.service.telemetry.page(), media_type=CONTENT_TYPE)


async def _api_error(_request: HttpRequest, error: ApiError) -> Response:
    return JSONResponse(error.body, error.status, error.headers)


async def _http_error(request: HttpRequest, error: HTTPException) -> Response:
    expected = {404: f"one of {', '.join(sorted(_PATHS))}", 405: "another method"}
    found = ApiError(
        error.status_code,
        f"{error.detail}; expected: {expected.get(error.status_code, 'another request')}; "
        f"got: {request.method} {request.url.path[:80]}; "
        "remedy: use the paths of OpenAI's interface",
        code={404: "not_found", 405: "method_not_allowed"}.get(error.status_code),
    )
    return JSONResponse(found.body, found.status, error.headers)


async def _internal_error(_request: HttpRequest, _error: Exception) -> Response:
    found = ApiError(
        500, "the server has failed; remedy: see its log", kind="server_error", code="internal"
    )
    return JSONResponse(found.body, found.status)


async def _disconnected(_request: HttpRequest, _error: Exception) -> Response:
    return Response(status_code=CLOSED)
