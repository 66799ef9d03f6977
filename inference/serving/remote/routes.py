"""The routes by which other machines send draft trees and receive verdicts.

GET    /v1/verify                           target and limits
POST   /v1/verify/sessions                  open a session, or continue a text in it
PUT    /v1/verify/sessions/ID/steps/N       submit the tree of a step; may be repeated
GET    /v1/verify/sessions/ID/memory        memory of verified tokens, with ?from=0&to=256
DELETE /v1/verify/sessions/ID               end a session
"""

import re

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from inference.remote.messages import MessageError, OpenSession, WireMessage, parse_message
from inference.serving.answers.events import unless_disconnected
from inference.serving.remote.sessions import RemoteSessions

REPLAYED = "jakiro-replayed"  # header of a verdict that was sent before

_JSON = "application/json"
_BYTES = "application/octet-stream"
_NUMBER = re.compile("[0-9]{1,9}")


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
    message = parse_message(await request.body(), OpenSession)
    work = _sessions(request).open(request.state.user, message)
    return _message(await unless_disconnected(request.receive, work), 201)


async def _submit(request: HttpRequest) -> Response:
    sessions, session = _sessions(request), _session(request)
    sessions.find(*session)  # before the body is read
    step = _number(request.path_params["step"], "the number of the step")
    decided = await sessions.submit(*session, step, await request.body())
    headers = {REPLAYED: "1"} if decided.verdict is None else {}
    return Response(decided.body, 200, headers, _BYTES if decided.has_rows else _JSON)


async def _memory(request: HttpRequest) -> Response:
    begin, end = (_number(request.query_params.get(name, ""), name) for name in ("from", "to"))
    rows = await _sessions(request).memory(*_session(request), begin, end)
    return Response(rows, media_type=_BYTES)


async def _close(request: HttpRequest) -> Response:
    _sessions(request).close(*_session(request))
    return Response(status_code=204)


def _sessions(request: HttpRequest) -> RemoteSessions:
    sessions: RemoteSessions = request.app.state.remote
    return sessions


def _session(request: HttpRequest) -> tuple[str, str]:
    """Return the user and the id of the session."""
    return request.state.user, request.path_params["session"]


def _number(text: str, name: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise MessageError("malformed_message", f"{name} is no number", got=repr(text[:20]))
    return int(text)


def _message(message: WireMessage, status: int = 200) -> Response:
    return Response(message.model_dump_json(), status, media_type=_JSON)
