"""The server's process: it listens, drains after SIGTERM, and ends if the engine dies."""

import asyncio
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from inference.decoder import SpeculativeDecoder
from inference.generation.prompts import needed
from inference.serving.app import create_app
from inference.serving.engine_thread import EngineThread
from inference.serving.service import Service
from inference.serving.settings import ServeSettings
from jakiro.errors import ResourceError
from jakiro.utils.logs import get_logger

_logger = get_logger(__name__)

_POLL_SECONDS = 0.05
_SECONDS_OF_ERROR_EVENTS = 2  # in which streams are ended after the engine has stopped


class Server(uvicorn.Server):
    """A server of one decoder.

    After the first signal, or `drain`, new requests get the status 503, and running ones may go on
    for some time. The second signal ends the process at once.

    Args:
        decoder: decoder with the target, the drafter and the tokenizer.
        settings: settings of the server.

    Raises:
        PromptError: the decoder has no tokenizer.
        ResourceError: the address cannot be used.
    """

    def __init__(self, decoder: SpeculativeDecoder, settings: ServeSettings) -> None:
        needed(decoder.tokenizer)
        self._socket = _listen(settings)
        try:
            self.engine = EngineThread(decoder, settings.places, settings.capacity)
        except BaseException:
            self._socket.close()
            raise
        self.service = Service(self.engine, settings)
        self._drain_until: float | None = None
        config = uvicorn.Config(
            create_app(self.service),
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_SECONDS_OF_ERROR_EVENTS,
        )
        super().__init__(config)

    @property
    def url(self) -> str:
        """The address of the interface."""
        host, port = self._socket.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain after the first signal, and end after the second one.

        Args:
            sig: number of the signal.
            frame: ignored.
        """
        if self.service.is_draining:
            self.should_exit = self.force_exit = True
        else:
            self.drain()

    def drain(self) -> None:
        """Accept no more requests, and end as soon as none is running or the time is over."""
        self.service.is_draining = True

    async def run_until_drained(self, on_ready: Callable[[str], object]) -> int:
        """Answer requests until the server is drained or the engine dies.

        Args:
            on_ready: function that is called with the URL as soon as requests are accepted.

        Returns:
            The exit code: 0 after a signal, 1 if the engine has died.
        """
        serving = asyncio.ensure_future(self.serve([self._socket]))
        try:
            while not serving.done() and not self.started:
                await asyncio.sleep(_POLL_SECONDS)
            if self.started:
                on_ready(self.url)
            while not serving.done() and not self._is_over():
                await asyncio.sleep(_POLL_SECONDS)
            await self._stop_engine()
            self.should_exit = True
            await serving
        finally:
            self.service.close()
            await self._stop_engine()
        return 0 if self.started and self.engine.error is None else 1

    def _is_over(self) -> bool:
        if self.should_exit or not self.engine.is_alive:
            return True
        if not self.service.is_draining:
            return False
        now = asyncio.get_running_loop().time()
        if self._drain_until is None:
            self._drain_until = now + self.service.settings.drain_seconds
            _logger.info("draining %d requests", self.service.num_active)
        return self.service.num_active == 0 or now >= self._drain_until

    async def _stop_engine(self) -> None:
        """Stop the engine; requests that are still running end with an error."""
        await asyncio.to_thread(self.engine.close)


def _listen(settings: ServeSettings) -> socket.socket:
    """Return a socket that listens on the address of the settings."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    address = (settings.host, settings.port)
    try:
        return socket.create_server(address, family=family, backlog=2048)
    except OSError as error:
        raise ResourceError(
            f"cannot listen on {settings.host}, port {settings.port}",
            expected="an address of this machine, and a port that is free",
            got=error.strerror or error,
            remedy="choose others with --host and --port",
        ) from error


def serve(
    decoder: SpeculativeDecoder, settings: ServeSettings, on_ready: Callable[[str], object]
) -> int:
    """Serve a decoder until a signal arrives, and return the exit code.

    Args:
        decoder: decoder with the target, the drafter and the tokenizer.
        settings: settings of the server.
        on_ready: function that is called with the URL as soon as requests are accepted.
    """
    server = Server(decoder, settings)
    return asyncio.run(server.run_until_drained(on_ready))
