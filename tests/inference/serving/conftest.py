"""A server that the tests of a module share."""

from collections.abc import Iterator

import pytest
from helpers.serving import Running, running, tiny_decoder
from openai import OpenAI


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server of a target with a trained drafter and trees of a fixed size."""
    with running(tiny_decoder(trained=True), queue=512) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[OpenAI]:
    """A client of the server."""
    with server.client() as found:
        yield found
