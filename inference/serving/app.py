"""The routes of the server, and what surrounds every request."""

import time
from typing import Any
from uuid import uuid4

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference.serving.chat import chat
from inference.serving.completions import complete
from inference.serving.events import Disconnected
from inference.serving.keys import ApiKeys
from inference.serving.models import get_model, list_models
from inference.serving.schema import ApiError
from inference.serving.service import Service
from inference.serving.static_page import page_routes
from inference.serving.telemetry import CONTENT_TYPE
from jakiro.utils.logs import get_logger

_logger = get_logger(__name__)

_ROUTES = [
    Route("/v1/completions", complete, methods=["POST"]),
    Route("/v1/chat/completions", chat, methods=["POST"]),
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{name:path}", get_model, methods=["GET"]),
]
_HEALTH = "/health"
_PATHS = {_HEALTH, "/metrics", *(route.path for route in _ROUTES if "{" not in route.path)}
_CLOSED = 499  # status in logs and metrics of requests whose client has disconnected


def create_app(service: Service) -> Starlette:
    """Return the application, as uvicorn runs it.

    Args:
        service: service that answers the requests.
    """
    settings = service.settings
    page = page_routes() if settings.playground else []
    keys = ApiKeys(key.get_secret_value() for key in settings.api_keys)
    middleware = [Middleware(_Journal, service)]
    if settings.allowed_origins:
        allowed: dict[str, Any] = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
        origins = list(settings.allowed_origins)
        middleware.append(Middleware(CORSMiddleware, allow_origins=origins, **allowed))
    middleware += [
        Middleware(_KeyCheck, keys, {_HEALTH, *(route.path for route in page)}),
        Middleware(_BodyLimit, settings.max_body_bytes),
    ]
    handlers: Any = {
        ApiError: _api_error,
        HTTPException: _http_error,
        Exception: _internal_error,
        Disconnected: _disconnected,
        ClientDisconnect: _disconnected,
    }
    operations = [Route(_HEALTH, _health), Route("/metrics", _metrics)]
    app = Starlette(
        routes=[*_ROUTES, *operations, *page], middleware=middleware, exception_handlers=handlers
    )
    app.state.service = service
    return app


async def _health(request: HttpRequest) -> Response:
    state = request.app.state.service.state
    return JSONResponse({"status": state}, 200 if state == "ready" else 503)


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
    return Response(status_code=_CLOSED)


class _Journal:
    """Gives every request an id, counts it, and writes one line about it to the log."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._telemetry = service.telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        started, codes = time.monotonic(), [_CLOSED]

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                codes.append(message["status"])
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            codes.append(500)
            raise
        finally:
            path = scope["path"] if scope["path"] in _PATHS else "other"
            self._telemetry.requests.labels(path, str(codes[-1])).inc()
            seconds = time.monotonic() - started
            _logger.info("%s %s %d in %.3f s", request_id, path, codes[-1], seconds)


def _request_id(scope: Scope) -> str:
    """Return the id that the client sent, if it is harmless, or a new one."""
    sent = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
    is_harmless = 0 < len(sent) <= 64 and sent.isascii() and sent.replace("-", "").isalnum()
    return sent if is_harmless else uuid4().hex


class _KeyCheck:
    """Refuses requests without a key, except those to some paths."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: set[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = dict(scope["headers"]).get(b"authorization", b"") if "headers" in scope else b""
        is_open = scope["type"] != "http" or scope["path"] in self._open_paths
        if is_open or self._keys.accept(sent.decode("latin-1")):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "the API key is missing or wrong; expected: a header `Authorization: Bearer KEY`; "
            "got: no accepted key; remedy: pass api_key= to the client",
            kind="authentication_error",
            code="invalid_api_key",
        )
        response = JSONResponse(error.body, 401, {"www-authenticate": "Bearer"})
        await response(scope, receive, send)


class _BodyLimit:
    """Refuses bodies that are too large, without reading the rest of them."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        size = 0

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_bytes:
                raise self._error()
            return message

        if declared.isdigit() and int(declared) > self._max_bytes:
            error = self._error()
            await JSONResponse(error.body, 413, error.headers)(scope, receive, send)
            return
        await self._app(scope, limited, send)

    def _error(self) -> ApiError:
        error = ApiError(
            413,
            f"the body is too large; expected: at most {self._max_bytes} bytes; got: more; "
            "remedy: send less, or start the server with a larger limit",
            code="body_too_large",
        )
        error.headers = {"connection": "close"}
        return error
