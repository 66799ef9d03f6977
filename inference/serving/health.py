"""The state of the server: whether it is alive, and whether it is ready."""

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from inference.serving.service import Service

_RETRY_SECONDS = "5"


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
