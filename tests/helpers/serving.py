"""A server on a real socket, in a thread of its own, and clients of it."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any

from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.templates import CHATML
from helpers.tokenizers import tiny_tokenizer
from openai import OpenAI

from inference import SpeculativeDecoder
from inference.drafters.lookup import LookupDrafter
from inference.drafters.trained.drafter import TrainedDrafter
from inference.serving.adaptation import Learner
from inference.serving.server import Server
from inference.serving.settings import ServeSettings
from jakiro.target.adapter import TargetAdapter

MODEL = "tiny"
SECONDS = 30.0  # after which a client or a test gives up


def tiny_decoder(trained: bool = False, template: str | None = CHATML) -> SpeculativeDecoder:
    """Return a decoder with a tokenizer that can encode any text."""
    tokenizer = tiny_tokenizer(template)
    model = tiny_llama(vocab=len(tokenizer), max_position_embeddings=512)
    drafter = tiny_drafter(TargetAdapter(model)) if trained else LookupDrafter()
    return SpeculativeDecoder(model, drafter, tokenizer, tree="fixed")


def trained_decoder(**settings: Any) -> SpeculativeDecoder:
    """Return a decoder whose drafter has these settings, and trees of a fixed size."""
    tokenizer = tiny_tokenizer(None)
    target = TargetAdapter(tiny_llama(vocab=len(tokenizer), max_position_embeddings=512))
    drafter = tiny_drafter(target, tiny_settings(**settings))
    return SpeculativeDecoder(target.model, drafter, tokenizer, tree="fixed")


def drafter_apart(decoder: SpeculativeDecoder) -> TrainedDrafter:
    """Return the drafter of a decoder, as another machine drafts with it."""
    assert isinstance(decoder.drafter, TrainedDrafter)
    return TrainedDrafter.for_target(decoder.drafter.model, decoder.target)


class Running:
    """A running server."""

    def __init__(
        self, decoder: SpeculativeDecoder, learner: Learner | None = None, **settings: Any
    ) -> None:
        chosen = {"port": 0, "model_name": MODEL, "capacity": 256, "drain_seconds": 5.0}
        found = ServeSettings(**{**chosen, **settings})
        self.server = Server(lambda: decoder, found, learner)
        self.code: int | None = None
        self._ready = Event()
        self._thread = Thread(target=self._run)
        self._thread.start()
        assert self._ready.wait(SECONDS)

    @property
    def url(self) -> str:
        """The address of the interface."""
        return self.server.url

    @property
    def address(self) -> tuple[str, int]:
        """The host and port of the server."""
        host, port = self.server._socket.getsockname()[:2]
        return host, port

    @property
    def root(self) -> str:
        """The address of the server."""
        return self.url.removesuffix("/v1")

    def client(self, key: str = "none", **options: Any) -> OpenAI:
        """Return a client that does not repeat requests."""
        chosen = {"max_retries": 0, "timeout": SECONDS, **options}
        return OpenAI(base_url=self.url, api_key=key, **chosen)

    def wait_until_idle(self) -> None:
        """Wait until no request runs or waits: the last one may still be on its way out."""
        scheduler = self.server.engine.scheduler
        end = monotonic() + SECONDS
        while scheduler.num_running or scheduler.num_waiting:
            assert monotonic() < end
            sleep(0.01)

    def join(self) -> int | None:
        """Wait for the end of the server, and return its exit code."""
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        return self.code

    def _run(self) -> None:
        def on_ready(_: str) -> None:
            self._ready.set()

        self.code = asyncio.run(self.server.run_until_drained(on_ready))


@contextmanager
def running(
    decoder: SpeculativeDecoder, learner: Learner | None = None, **settings: Any
) -> Iterator[Running]:
    """Run a server in the block, and check that it ends without an error."""
    found = Running(decoder, learner, **settings)
    try:
        yield found
    finally:
        found.server.drain()
        code = found.join()
    assert code == 0


def deltas(chunks: Sequence[Any]) -> str:
    """Return the text of a stream's chunks."""
    parts = (choice for chunk in chunks for choice in chunk.choices)
    return "".join(
        part.text if hasattr(part, "text") else part.delta.content or "" for part in parts
    )
