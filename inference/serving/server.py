"""The server's process: it listens, loads, drains after SIGTERM, and ends if the engine dies."""

import asyncio
import gc
import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from inference.generation.prompts import needed
from inference.protocol import request_counter_of
from inference.serving.access import ApiKeys
from inference.serving.app import create_app
from inference.serving.engine_thread import EngineThread, LoadedModel
from inference.serving.service import Service
from inference.serving.settings import ServeSettings
from jakiro.errors import ResourceError
from jakiro.utils.logs import get_logger
from jakiro.utils.progress import in_background

if TYPE_CHECKING:  # a server answers before the modules of models are imported
    from inference.decoder import SpeculativeDecoder
    from inference.serving.adaptation import Adaptation, Learner

_logger = get_logger(__name__)

_POLL_SECONDS = 0.05
_SECONDS_OF_ERROR_EVENTS = 2  # time to end streams after the engine has stopped
_SECONDS_OF_IDLE_CONNECTIONS = 10  # more than the 5 after which usual clients close them


class Server(uvicorn.Server):
    """A server of one decoder, which is loaded while the server already answers.

    After the first signal, or `drain`, new requests get the status 503, and running ones may
    continue for some time. The second signal ends the process at once.

    Args:
        load: function that returns the decoder with the target, the drafter and the tokenizer; it
            is called in a thread of its own.
    """

    def __init__(
        self,
        load: Callable[[], "SpeculativeDecoder"],
        settings: ServeSettings,
        learner: "Learner | None" = None,
    ) -> None:
        assert learner is not None or settings.adapt == "off"
        keys = ApiKeys((key.get_secret_value() for key in settings.api_keys), settings.keys_file)
        self._has_several_users = keys.are_several
        self.service = Service(settings)
        super().__init__(_config(self.service, keys))
        self._load, self._learner = load, learner
        self._loading: Future[tuple[LoadedModel, Adaptation | None]] | None = None
        self._adapting: asyncio.Task[None] | None = None
        self._drain_until: float | None = None
        self._socket = _listen(settings)

    @property
    def url(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

    @property
    def engine(self) -> EngineThread:
        """The engine of the model, which must have been loaded."""
        return self.service.model.engine

    @property
    def is_loading(self) -> bool:
        return self._loading is not None and not self._loading.done()

    @property
    def is_computing(self) -> bool:
        """Whether the model is being loaded, or the engine's thread is running."""
        return self.is_loading or (self.service.has_model and self.engine.is_alive)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain after the first signal, and end after the second one."""
        if self.service.is_draining:
            self.should_exit = self.force_exit = True
        else:
            self.drain()

    def drain(self) -> None:
        """Accept no more requests, and end as soon as none is running or the time is up."""
        self.service.is_draining = True

    async def run_until_drained(self, on_ready: Callable[[str], object]) -> int:
        """Answer requests until the server is drained or the engine dies.

        Returns:
            The exit code: 0 after a signal, 1 if the engine has died.
        """
        serving = asyncio.ensure_future(self.serve([self._socket]))
        try:
            await self._until(lambda: serving.done() or self.started)
            await self._load_model(serving, on_ready)
            await self._until(lambda: serving.done() or self._is_over())
            await self._stop_engine()
            self.should_exit = True
            await serving
        finally:
            self.should_exit = True
            self.service.close()
            await self._stop_adapting()
            await self._stop_engine()
            await asyncio.gather(serving, return_exceptions=True)
            self._socket.close()
        has_failed = self.service.has_model and self.engine.error is not None
        return 1 if has_failed or not self.started else 0

    async def _load_model(
        self, serving: "asyncio.Future[None]", on_ready: Callable[[str], object]
    ) -> None:
        """Load the model, unless a signal arrives first."""
        loading = self._loading = in_background(self._open)
        await self._until(lambda: serving.done() or loading.done() or self.service.is_draining)
        if not loading.done():
            return
        model, adaptation = loading.result()
        _logger.info("%s", model)
        self.service.start(model, adaptation)
        if adaptation is not None:
            self._adapting = asyncio.create_task(adaptation.run())
        if not self.service.is_draining and not serving.done():
            on_ready(self.url)

    def _open(self) -> "tuple[LoadedModel, Adaptation | None]":
        """Return the model, whose caches are allocated, and the adaptation of its drafter, if any.

        This method runs in a thread of its own.
        """
        service, settings = self.service, self.service.settings
        decoder = self._load()
        needed(decoder.tokenizer)
        if settings.remote_sessions:
            decoder.target.need_trees("remote_sessions")
        on_step = service.telemetry.step.observe
        engine = EngineThread(decoder, settings.places, settings.capacity, on_step)
        model = LoadedModel(engine, settings.model_name)
        learns = settings.adapt != "off" or request_counter_of(decoder.drafter) is not None
        # Versions in a folder may have learned from users whose keys this server does not have.
        has_others = self._has_several_users or settings.adapt_folder is not None
        model.details.hides_rejected = learns and has_others
        if settings.adapt == "off" or self._learner is None:
            return model, None
        from inference.serving.adaptation import Adaptation

        try:
            return model, Adaptation(
                model, settings, self._learner, service.telemetry, lambda: service.num_active > 0
            )
        except BaseException:
            engine.close()
            raise

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(_POLL_SECONDS)

    def _is_over(self) -> bool:
        if self.should_exit or (self.service.has_model and not self.engine.is_alive):
            return True
        if not self.service.is_draining:
            return False
        now = asyncio.get_running_loop().time()
        if self._drain_until is None:
            self._drain_until = now + self.service.settings.drain_seconds
            _logger.info("draining %d requests", self.service.num_active)
        return self.service.num_active == 0 or now >= self._drain_until

    async def _stop_adapting(self) -> None:
        if self._adapting is not None:
            self._adapting.cancel()
            await asyncio.gather(self._adapting, return_exceptions=True)
        if self.service.adaptation is not None:
            await self.service.adaptation.close()

    async def _stop_engine(self) -> None:
        """Stop the engine; requests that are still running end with an error.

        After a second signal, this does not wait for the step that the engine computes.
        """
        if self.service.has_model:
            closing = in_background(self.engine.close)
            await self._until(lambda: closing.done() or self.force_exit)


def _listen(settings: ServeSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listener = socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        raise ResourceError(
            f"cannot listen on {settings.host}, port {settings.port}",
            got=error.strerror or error,
            remedy="choose others with --host and --port",
        ) from error
    # Connections inherit this. Otherwise, the body after a head, and each event, may wait 40 ms
    # until the client confirms what was sent before.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _config(service: Service, keys: ApiKeys) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(service, keys),
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_SECONDS_OF_IDLE_CONNECTIONS,
        timeout_graceful_shutdown=_SECONDS_OF_ERROR_EVENTS,
    )


def serve(
    load: Callable[[], "SpeculativeDecoder"],
    settings: ServeSettings,
    on_ready: Callable[[str], object],
    learner: "Learner | None" = None,
) -> int:
    """Serve a decoder until a signal arrives, and return the exit code.

    The process ends here if the signal arrives while the decoder is still being loaded, or if a
    second signal arrives during a step.
    """
    server = Server(load, settings, learner)

    def ready(url: str) -> None:
        # The many objects of libraries and models live as long as the process. Without them,
        # garbage collections delay requests much less.
        gc.collect()
        gc.freeze()
        on_ready(url)

    code = asyncio.run(server.run_until_drained(ready))
    if server.is_computing:
        # The interpreter must not be torn down while a thread runs in the libraries of the models.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
