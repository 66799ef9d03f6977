"""A server that the tests of a module share."""

from collections.abc import Iterator

import pytest
from helpers.serving import Running, running, tiny_decoder, trained_decoder

from inference import SpeculativeDecoder
from inference.device import link


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    """A decoder with prompt lookup and trees of a fixed size."""
    return tiny_decoder()


@pytest.fixture(scope="module")
def server(decoder: SpeculativeDecoder) -> Iterator[Running]:
    """A server of the decoder's target for devices."""
    with running(decoder, remote_sessions=8) as found:
        yield found


@pytest.fixture(scope="module")
def moa() -> SpeculativeDecoder:
    """A decoder with a trained drafter."""
    return trained_decoder()


@pytest.fixture(scope="module")
def moa_server(moa: SpeculativeDecoder) -> Iterator[Running]:
    """A server that encodes memory for trained drafters."""
    with running(moa, remote_sessions=8) as found:
        yield found


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients repeat lost requests at once."""
    monkeypatch.setattr(link, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(link, "_LONGEST_PAUSE", 0.02)
    monkeypatch.setattr(link, "seconds_to_wait", lambda _: 0.0)
