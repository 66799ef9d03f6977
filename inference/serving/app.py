"""The routes of the server, the handlers of short requests, and the order of the checks."""

from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from inference.serving.answers.chat import chat
from inference.serving.answers.completions import complete
from inference.serving.answers.events import Disconnected
from inference.serving.api_error import ApiError
from inference.serving.checks.access import HostCheck, KeyCheck, OriginCheck
from inference.serving.checks.keys import ApiKeys, User
from inference.serving.checks.rate_limits import FailureLimit
from inference.serving.checks.request_limits import BodyLimit, HeadLimit
from inference.serving.journal import CLOSED, Journal
from inference.serving.remote.routes import remote_routes
from inference.serving.remote.sessions import RemoteSessions
from inference.serving.service import Service
from inference.serving.static_page import page_routes
from inference.serving.telemetry import CONTENT_TYPE

_RETRY_SECONDS = "5"


async def list_models(request: HttpRequest) -> Response:
    """Answer a request to `/v1/models`.

    Raises:
        ApiError: the model is still loading.
    """
    return JSONResponse({"object": "list", "data": [_model(request.app.state.service)]})


async def get_model(request: HttpRequest) -> Response:
    """Answer a request to `/v1/models/NAME`.

    Raises:
        ApiError: there is no model of this name, or the model is still loading.
    """
    model = _model(request.app.state.service)
    name = request.path_params["name"]
    if name != model["id"]:
        raise ApiError(
            404,
            f"there is no such model; expected: {model['id']}; got: {name[:80]!r}; "
            "remedy: see /v1/models",
            param="model",
            code="model_not_found",
        )
    return JSONResponse(model)


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.model.name,
        "object": "model",
        "created": service.model.created,
        "owned_by": "jakiro",
    }


async def forget(request: HttpRequest) -> Response:
    """Answer a request to `DELETE /v1/adaptation`."""
    service: Service = request.app.state.service
    service.check_ready()
    user: User = request.state.user
    user.rate.begin()
    if service.adaptation is None:
        raise ApiError(
            404,
            "the drafter of this server does not learn; expected: a server that was started with "
            "--adapt shared; got: --adapt off; remedy: none is needed, because no text is kept "
            "to learn from",
            code="not_adapting",
        )
    purged = await service.adaptation.purge(user.name)
    return JSONResponse({"object": "adaptation.deleted", "deleted": True, **purged._asdict()})


_ROUTES = [
    Route("/v1/completions", complete, methods=["POST"]),
    Route("/v1/chat/completions", chat, methods=["POST"]),
    Route("/v1/adaptation", forget, methods=["DELETE"]),
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{name:path}", get_model, methods=["GET"]),
]
_OPEN = {"/health", "/health/live"}  # paths that need no key, besides those of the playground
_SESSIONS = "/v1/verify/sessions"
_METHODS = ["DELETE", "GET", "POST", "PUT"]  # methods of all routes
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
    app.state.paths = paths
    if remote:
        app.state.remote = RemoteSessions(service)
    return app


def _checks(
    service: Service, keys: ApiKeys, open_paths: set[str], paths: set[str]
) -> list[Middleware]:
    """Return the checks that a request passes before it reaches its route, in this order."""
    settings = service.settings
    origins = settings.allowed_origins
    cors: dict[str, Any] = {"allow_methods": _METHODS, "allow_headers": ["*"]}
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
    paths = sorted(request.app.state.paths)
    expected = {404: f"one of {', '.join(paths)}", 405: "another method"}
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


async def health(request: HttpRequest) -> Response:
    """Answer a request to `/health` with status 200 if the server is ready, and 503 otherwise."""
    body = _body(request)
    if body["ready"]:
        return JSONResponse(body)
    return JSONResponse(body, 503, {"retry-after": _RETRY_SECONDS})


async def live(request: HttpRequest) -> Response:
    """Answer a request to `/health/live` with status 200 unless the engine is dead."""
    body = _body(request)
    return JSONResponse(body, 200 if body["live"] else 503)


def _body(request: HttpRequest) -> dict[str, object]:
    service: Service = request.app.state.service
    state = service.state
    return {"status": state, "live": state != "dead", "ready": state == "ready"}
