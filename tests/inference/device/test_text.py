"""Texts on the way over a network that loses requests and replies."""

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from helpers.bad_network import LOST, PASSED, SILENT, bad_network
from helpers.offline import InProcessLink
from helpers.remote import sequence_tree, tensors
from helpers.serving import Running, running

from inference import SpeculativeDecoder
from inference.device import RemoteDecoder
from inference.device import link as server_link
from inference.device.link import AnsweredStep, SessionGone
from inference.device.offline_text import OfflineWriting
from inference.device.text import RemoteOutput, RemoteText
from inference.draft_tree import ROOT
from inference.drafters.lookup import LookupDrafter
from inference.remote.messages import MessageError, OpenSession
from inference.remote.tree_frame import encode_step
from jakiro.errors import ConfigError, ResourceError

PROMPT = [5, 6, 7, 5, 6, 7, 5]
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "max_new_tokens": 7},
    "sampled": {"temperature": 0.7, "top_k": 2, "seed": 11, "max_new_tokens": 7},
}


def _written(url: str, mode: str) -> RemoteOutput:
    with RemoteDecoder(url, LookupDrafter(), patience=20.0) as remote:
        return remote.generate(PROMPT, **OPTIONS[mode])


def _expected(decoder: SpeculativeDecoder, mode: str) -> tuple[list[int], str | None]:
    alone = decoder.generate(PROMPT, **OPTIONS[mode])
    return alone.new_token_ids, alone.text


def test_another_client_with_the_same_session_is_noticed(server: Running) -> None:
    roots: list[int] = []

    def intrude(number: int, path: str) -> str:
        if number == 2:
            tree = encode_step(len(PROMPT), roots[-1], sequence_tree(tensors([1], [ROOT])))
            assert httpx2.put(server.root + path, content=tree.body).status_code == 200
        return PASSED

    with bad_network(server.root, intrude) as network, RemoteDecoder(network.url) as remote:
        steps = remote.steps(PROMPT, temperature=0, max_new_tokens=30)
        roots += next(steps).token_ids
        with pytest.raises(MessageError, match="step_conflict"):
            list(steps)


def test_a_connection_that_dies_without_a_sign_is_replaced(
    decoder: SpeculativeDecoder, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_link, "_FIRST_WAIT", 0.5)
    with bad_network(server.root, lambda number, _: SILENT if number == 2 else PASSED) as network:
        output = _written(network.url, "sampled")
    assert (output.new_token_ids, output.text) == _expected(decoder, "sampled")
    assert output.traffic.num_repeats == 1


@pytest.fixture
def roomy(decoder: SpeculativeDecoder) -> Iterator[Running]:
    """A server for clients that cannot end their sessions."""
    with running(decoder, remote_sessions=8) as found:
        yield found


@pytest.mark.parametrize("mode", OPTIONS)
def test_a_text_that_stops_has_what_was_verified(
    decoder: SpeculativeDecoder, roomy: Running, mode: str
) -> None:
    expected, text = _expected(decoder, mode)
    for first in range(2, 6):
        with (
            bad_network(roomy.root, lambda number, _, at=first: _lost_from(at, number)) as network,
            RemoteDecoder(network.url, LookupDrafter(), patience=0.1, offline="stop") as remote,
        ):
            output = remote.generate(PROMPT, **OPTIONS[mode])
        assert isinstance(output.error, ResourceError)
        assert not output.is_verified
        count = len(output.new_token_ids)
        assert 0 < count < 7
        assert output.new_token_ids == expected[:count]
        assert (text or "").startswith(output.text or "")
        assert len(output.depths) == count
        assert output.seed == OPTIONS[mode].get("seed", output.seed)


def _lost_from(first: int, number: int) -> str:
    return PASSED if number < first else LOST


def test_nothing_is_written_without_a_drafter(server: Running) -> None:
    with pytest.raises(ConfigError, match="with a drafter"):
        RemoteDecoder(server.url, offline=OfflineWriting())
    # a TypeError, if the types of arguments are checked
    with pytest.raises((ConfigError, TypeError), match="offline"):
        RemoteDecoder(server.url, LookupDrafter(), offline="write")  # type: ignore[arg-type]


def test_a_text_that_stops_before_its_first_token_is_an_error(server: Running) -> None:
    with (
        bad_network(server.root, lambda number, _: _lost_from(1, number)) as network,
        RemoteDecoder(network.url, patience=0.1, offline="stop") as remote,
        pytest.raises(ResourceError, match="cannot reach the server"),
    ):
        remote.generate(PROMPT, **OPTIONS["greedy"])


class _Forgetful(InProcessLink):
    """A server that forgets every session before its first step."""

    def submit(self, *_: object) -> AnsweredStep:
        raise SessionGone


def test_sessions_that_are_lost_again_and_again_end_the_text(decoder: SpeculativeDecoder) -> None:
    request = OpenSession(prompt=PROMPT, seed=0, max_tokens=7, temperature=1.3, top_k=3)
    link = _Forgetful(decoder)
    text = RemoteText(link, request, LookupDrafter())
    with pytest.raises(ResourceError, match="loses the text again and again"):
        list(text.steps())
    assert text.traffic.num_resumes == 8
    assert len(text.output().new_token_ids) == 1
