"""The list of models, which has one entry."""

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from inference.serving.api_error import ApiError
from inference.serving.service import Service


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
