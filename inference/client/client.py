"""Connections to a server with OpenAI's interface."""

import asyncio
from difflib import get_close_matches
from types import TracebackType
from typing import NamedTuple

import httpx2
from pydantic import BaseModel, ConfigDict, ValidationError

from inference.client.address import server_address
from inference.client.answer import AnswerReader, ServerAnswer
from inference.client.failures import described, refused_key
from inference.client.request import ServerRequest
from jakiro.errors import ConfigError, JakiroError, ResourceError

_DONE = "[DONE]"
_OWN = "jakiro"
_SECONDS_TO_CONNECT = 10.0
_MOST_NAMES = 5  # largest number of models that an error names


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    id: str
    owned_by: str | None = None


class _Models(BaseModel):
    data: list[_Model]


class ServedModel(NamedTuple):
    """A model of a server."""

    name: str
    is_own: bool  # whether `jakiro serve` serves it


class ServerClient:
    """A client of one server, for use in one event loop.

    Args:
        url: address of the interface, which usually ends with `/v1`; an address without a path gets
            this ending.
        key: API key; None to send none.
        connections: largest number of connections at the same time.
        seconds: seconds after which a request is given up.

    Raises:
        ConfigError: the address cannot be used.
    """

    def __init__(
        self, url: str, key: str | None = None, connections: int = 16, seconds: float = 600.0
    ) -> None:
        self.url = server_address(url)
        self.seconds = seconds
        self.model = ServedModel("", is_own=False)  # until `connect` is called
        self._has_key = key is not None
        self._http = httpx2.AsyncClient(
            base_url=f"{self.url}/",
            headers={} if key is None else {"authorization": f"Bearer {key}"},
            timeout=httpx2.Timeout(None, connect=_SECONDS_TO_CONNECT),
            limits=httpx2.Limits(
                max_connections=connections, max_keepalive_connections=connections
            ),
        )

    async def __aenter__(self) -> "ServerClient":
        """Return the client; the end of the block closes its connections."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close all connections.

        Args:
            kind: ignored.
            error: ignored.
            trace: ignored.
        """
        await self._http.aclose()

    async def connect(self, model: str | None = None) -> ServedModel:
        """Find the model that all later requests name.

        Args:
            model: name of the model; None for the only one that the server has.

        Raises:
            ConfigError: there is no such interface, key or model.
            ResourceError: the server cannot be reached, or is not ready.
        """
        try:
            response = await self._http.get("models")
        except httpx2.HTTPError as error:
            raise self._unreachable(error) from error
        if response.status_code == httpx2.codes.NOT_FOUND and model is not None:
            self.model = ServedModel(model, is_own=False)  # some servers list no models
        else:
            self.model = self._chosen(model, self._models(response))
        return self.model

    async def ask(self, request: ServerRequest, cut_after: int | None = None) -> ServerAnswer:
        """Return the answer to a request, which contains the error if there is one.

        Args:
            request: request to send once.
            cut_after: number of parts of the text after which a stream is closed; None to read all
                of it.
        """
        reader = AnswerReader()
        try:
            async with asyncio.timeout(self.seconds):
                if request.is_streamed:
                    await self._read_stream(request, reader, cut_after)
                else:
                    await self._read_whole(request, reader)
        except TimeoutError:
            return reader.end(f"no complete answer within {self.seconds:g} seconds")
        except httpx2.HTTPError as error:
            return reader.end(described(error))
        return reader.end()

    async def send(self, path: str, content: bytes) -> ServerAnswer:
        """Return the answer to any content.

        Args:
            path: path below the URL of the server.
            content: body of the request.
        """
        reader = AnswerReader()
        try:
            async with asyncio.timeout(self.seconds):
                head = {"content-type": "application/json"}
                response = await self._http.post(path, content=content, headers=head)
        except (TimeoutError, httpx2.HTTPError) as error:
            return reader.end(described(error))
        _note(response, reader)
        return reader.end()

    async def _read_stream(
        self, request: ServerRequest, reader: AnswerReader, cut_after: int | None
    ) -> None:
        body = request.body(self.model.name)
        is_done = False
        async with self._http.sse(request.path, method="POST", json=body) as events:
            if events.response.status_code != httpx2.codes.OK:
                await events.response.aread()
                _note(events.response, reader)
                return
            reader.answer.status = events.response.status_code
            async for event in events:
                if event.data == _DONE:
                    is_done = True
                    continue
                reader.add(event.data)
                if cut_after is not None and len(reader.answer.arrivals) >= cut_after:
                    reader.answer.is_cut = True
                    return
        if not is_done and reader.answer.error is None:
            reader.answer.error = f"the stream ended without {_DONE}"

    async def _read_whole(self, request: ServerRequest, reader: AnswerReader) -> None:
        _note(await self._http.post(request.path, json=request.body(self.model.name)), reader)

    def _models(self, response: httpx2.Response) -> list[_Model]:
        """Return the models in a response.

        Raises:
            ConfigError: there is no such interface, or the key is not accepted.
            ResourceError: the server is not ready.
        """
        status = response.status_code
        if status in (httpx2.codes.UNAUTHORIZED, httpx2.codes.FORBIDDEN):
            raise refused_key(self.url, status, has_key=self._has_key)
        if status >= httpx2.codes.INTERNAL_SERVER_ERROR:
            raise ResourceError(
                f"the server at {self.url} is not ready",
                expected="status 200",
                got=f"status {status}",
                remedy="wait until the server is ready, or check its log",
            )
        try:
            return _Models.model_validate_json(response.content).data
        except ValidationError as error:
            raise ConfigError(
                f"there is no interface like OpenAI's at {self.url}",
                expected="a list of models at the path /models",
                got=f"status {status} with other content",
                remedy="check the URL, which usually ends with /v1",
            ) from error

    def _chosen(self, name: str | None, models: list[_Model]) -> ServedModel:
        found = [model for model in models if name in (None, model.id)]
        if len(found) == 1 or (found and name is not None):
            return ServedModel(found[0].id, found[0].owned_by == _OWN)
        names = [model.id for model in models]
        close = get_close_matches(name or "", names, n=1)
        shown = ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")
        raise ConfigError(
            f"the server at {self.url} does not have this model"
            if name is not None
            else f"the server at {self.url} has several models, or none",
            expected=f"one of {shown}" if names else "a server with a model",
            got=name or f"no --model, and {len(names)} models",
            remedy=f"did you mean --model {close[0]}?" if close else "choose one with --model",
        )

    def _unreachable(self, error: httpx2.HTTPError) -> JakiroError:
        return ResourceError(
            f"cannot reach the server at {self.url}",
            expected="a server that is running and can be reached from here",
            got=described(error),
            remedy="start the server, or check --url",
        )


def _note(response: httpx2.Response, reader: AnswerReader) -> None:
    """Add a response that is not a stream to an answer."""
    reader.answer.status = response.status_code
    reader.answer.retry_after = response.headers.get("retry-after")
    if response.status_code == httpx2.codes.OK:
        reader.add(response.content)
    else:
        reader.refuse(response.content)
