"""A user's request to forget the user's texts, and all that was learned from them."""

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from inference.serving.api_error import ApiError
from inference.serving.keys import User
from inference.serving.service import Service


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
            "--adapt shared; got: --adapt off; remedy: none is needed, because no text is kept",
            code="not_adapting",
        )
    purged = await service.adaptation.purge(user.name)
    return JSONResponse({"object": "adaptation.deleted", "deleted": True, **purged._asdict()})
