"""The routes by which other machines send draft trees and receive verdicts.

GET    /v1/verify                           target and limits
POST   /v1/verify/sessions                  open a session, or continue a text in it
PUT    /v1/verify/sessions/ID/steps/N       submit the tree of a step; may be repeated
GET    /v1/verify/sessions/ID/memory        memory of verified tokens, with ?from=0&to=256
DELETE /v1/verify/sessions/ID               end a session
"""

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from inference.remote.errors import MessageError
from inference.remote.messages import OpenSession, WireMessage, parse_message
from inference.serving.answers.events import unless_disconnected
from inference.serving.api_error import ApiError
from inference.serving.remote.sessions import RemoteSessions

REPLAYED = "jakiro-replayed"  # header of a verdict that was sent before

_JSON = "application/json"
_BYTES = "application/octet-stream"
_MAX_DIGITS = 9


def remote_routes() -> list[Route]:
    """Return the routes."""
    session = "/v1/verify/sessions/{session}"
    return [
        Route("/v1/verify", _info, methods=["GET"]),
        Route("/v1/verify/sessions", _open, methods=["POST"]),
        Route(session, _close, methods=["DELETE"]),
        Route(f"{session}/memory", _memory, methods=["GET"]),
        Route(f"{session}/steps/{{step}}", _submit, methods=["PUT"]),
    ]


async def _info(request: HttpRequest) -> Response:
    return _message(await _sessions(request).info())


async def _open(request: HttpRequest) -> Response:
    sessions, user = _sessions(request), _user(request)
    try:
        message = parse_message(await request.body(), OpenSession)
    except MessageError as error:
        raise ApiError(400, str(error), code=error.code) from error
    opened = await unless_disconnected(request.receive, sessions.open(user, message))
    return _message(opened, 201)


async def _submit(request: HttpRequest) -> Response:
    sessions, user = _sessions(request), _user(request)
    sessions.registry.find(user, _session(request))  # before the body is read
    body = await request.body()
    decided = await sessions.submit(user, _session(request), _step(request), body)
    headers = {REPLAYED: "1"} if decided.is_replay else {}
    kind = _BYTES if decided.has_rows else _JSON
    return Response(decided.body, headers=headers, media_type=kind)


async def _memory(request: HttpRequest) -> Response:
    begin, end = (_number(str(request.query_params.get(own, "")), own) for own in ("from", "to"))
    rows = await _sessions(request).memory(_user(request), _session(request), begin, end)
    return Response(rows, media_type=_BYTES)


async def _close(request: HttpRequest) -> Response:
    _sessions(request).close(_user(request), _session(request))
    return Response(status_code=204)


def _sessions(request: HttpRequest) -> RemoteSessions:
    found: RemoteSessions = request.app.state.remote
    return found


def _user(request: HttpRequest) -> str:
    user: str = request.state.user
    return user


def _session(request: HttpRequest) -> str:
    return str(request.path_params["session"])


def _step(request: HttpRequest) -> int:
    return _number(str(request.path_params["step"]), "the number of the step")


def _number(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise ApiError(
            400,
            f"{name} cannot be used; expected: an integer of at least 0; got: {text[:20]!r}; "
            "remedy: count steps and positions in decimal digits",
            code="malformed_message",
        )
    return int(text)


def _message(message: WireMessage, status: int = 200) -> Response:
    return Response(message.model_dump_json(), status, media_type=_JSON)
