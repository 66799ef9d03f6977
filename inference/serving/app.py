"""The routes of the server, its playground, handlers of short requests, and the order of checks."""

from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from inference.serving.access import AccessCheck, ApiKeys, BodyLimit
from inference.serving.answer import Disconnected, answer
from inference.serving.api_error import ApiError, api_error_of
from inference.serving.engine_thread import LoadedModel
from inference.serving.formats import ChatForm, CompletionForm
from inference.serving.service import Service
from inference.serving.settings import ServeSettings, is_loopback
from inference.serving.telemetry import CONTENT_TYPE
from jakiro.errors import JakiroError

_CLOSED = 499  # status in logs of requests whose client has disconnected
_PAGE_FOLDER = ("inference.serving", "playground")
_PAGE_POLICY = "; ".join(
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
_PAGE_HEADERS = {
    "cache-control": "no-cache",  # files may be stored, but must be compared by their ETag
    "content-security-policy": _PAGE_POLICY,
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


async def list_models(request: HttpRequest) -> Response:
    model: LoadedModel = request.app.state.service.model
    data = {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "jakiro",
    }
    if (name := request.path_params.get("name")) is None:
        return JSONResponse({"object": "list", "data": [data]})
    model.check_name(name)
    return JSONResponse(data)


async def forget(request: HttpRequest) -> Response:
    """Answer a request to `DELETE /v1/adaptation`: the texts of the user are forgotten."""
    service: Service = request.app.state.service
    service.check_ready()
    if service.adaptation is None:
        raise ApiError(
            404,
            "the drafter of this server does not learn, so no text is kept",
            code="not_adapting",
        )
    texts, versions = await service.adaptation.purge(request.state.user)
    return JSONResponse(
        {"object": "adaptation.deleted", "deleted": True, "texts": texts, "versions": versions}
    )


async def health(request: HttpRequest, needed: str = "ready") -> Response:
    """Answer with status 200 if the server is ready, or if it is only needed to be live."""
    state = request.app.state.service.state
    body = {"status": state, "live": state != "dead", "ready": state == "ready"}
    return JSONResponse(body) if body[needed] else JSONResponse(body, 503, {"retry-after": "5"})


async def _metrics(request: HttpRequest) -> Response:
    return Response(request.app.state.service.telemetry.page(), media_type=CONTENT_TYPE)


_ROUTES = [
    Route("/v1/completions", partial(answer, kind=CompletionForm), methods=["POST"]),
    Route("/v1/chat/completions", partial(answer, kind=ChatForm), methods=["POST"]),
    Route("/v1/adaptation", forget, methods=["DELETE"]),
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{name:path}", list_models, methods=["GET"]),
    Route("/health", health),
    Route("/health/live", partial(health, needed="live")),
    Route("/metrics", _metrics),
]


def create_app(service: Service, keys: ApiKeys) -> Starlette:
    handlers: Any = {
        ApiError: _api_error,
        JakiroError: _jakiro_error,
        HTTPException: _http_error,
        Exception: _internal_error,
        Disconnected: _disconnected,
        ClientDisconnect: _disconnected,
    }
    app = Starlette(
        routes=[*_ROUTES, *(_page_routes() if service.settings.playground else [])],
        middleware=_checks(service.settings, keys),
        exception_handlers=handlers,
    )
    # A redirection from a path with a slash at its end would name `http` behind a proxy with TLS,
    # and clients would send their keys there.
    app.router.redirect_slashes = False
    app.state.service = service
    if service.settings.remote_sessions:
        from inference.serving.sessions import add_remote_routes

        add_remote_routes(app, service)
    return app


def _checks(settings: ServeSettings, keys: ApiKeys) -> list[Middleware]:
    """Return the checks that a request passes before it reaches its route, in this order.

    The name of the host is checked because a web page can let its own name point to this machine
    (DNS rebinding), and would then be of the same origin as the server.
    """
    hosts, origins = settings.allowed_hosts, settings.allowed_origins
    if not hosts and not is_loopback(settings.host):
        hosts = ("*",)
    everything = ["*"]
    return [
        Middleware(
            TrustedHostMiddleware,
            allowed_hosts=[*hosts, settings.host, "localhost", "127.0.0.1", "[::1]"],
            www_redirect=False,
        ),
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=everything,
            allow_headers=everything,
        ),
        Middleware(AccessCheck, keys, origins),
        Middleware(BodyLimit),
    ]


async def _api_error(_request: HttpRequest, error: ApiError) -> Response:
    return error.response


async def _jakiro_error(_request: HttpRequest, error: JakiroError) -> Response:
    return api_error_of(error).response


async def _http_error(request: HttpRequest, error: HTTPException) -> Response:
    codes = {404: "not_found", 405: "method_not_allowed"}
    message = f"{error.detail}: {request.method} {request.url.path[:80]}"
    response = ApiError(error.status_code, message, code=codes.get(error.status_code)).response
    response.headers.update(error.headers or {})
    return response


async def _internal_error(_request: HttpRequest, _error: Exception) -> Response:
    message = "the server has failed; remedy: see its log"
    return ApiError(500, message, kind="server_error", code="internal").response


async def _disconnected(_request: HttpRequest, _error: Exception) -> Response:
    return Response(status_code=_CLOSED)


class _Page(StaticFiles):
    def file_response(self, *args: Any, **options: Any) -> Response:
        response = super().file_response(*args, **options)
        response.headers.update(_PAGE_HEADERS)
        return response


def _page_routes() -> list[BaseRoute]:
    page = _Page(packages=[_PAGE_FOLDER], html=True)
    return [Route("/", page), Mount("/playground", _Page(packages=[_PAGE_FOLDER]))]
