"""What a device says about a server that cannot be used."""

from contextlib import closing
from typing import Any

import pytest
from helpers.bad_network import BUSY, GATEWAY, LOST, PASSED, UNANSWERED, bad_network
from helpers.false_server import Made, false_server
from helpers.serving import Running, running

from inference import SpeculativeDecoder
from inference.device import RemoteDecoder
from inference.device.link import LinkTraffic, ServerLink, SessionGone
from inference.remote.messages import OpenSession
from jakiro.errors import ConfigError, ResourceError

KEY = "a key of the server"
OPEN = OpenSession(prompt=[1, 2], seed=0, max_tokens=4)
SHORT: dict[str, Any] = {"temperature": 0, "max_new_tokens": 4}


def test_a_server_that_cannot_be_reached_is_named() -> None:
    with pytest.raises(ResourceError, match=r"cannot reach the server at http://127\.0\.0\.1:1/v1"):
        RemoteDecoder("http://127.0.0.1:1")


def test_an_address_with_a_password_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="JAKIRO_API_KEY") as found:
        ServerLink("http://someone:a-secret@127.0.0.1:1/v1")
    assert "a-secret" not in str(found.value)


@pytest.mark.parametrize("key", [None, "another key"])
def test_a_refused_key_is_named_but_not_shown(decoder: SpeculativeDecoder, key: str | None) -> None:
    with running(decoder, remote_sessions=1, api_keys=(KEY,)) as server:
        with pytest.raises(ConfigError, match="refuses the API key") as found:
            RemoteDecoder(server.url, key=key)
        assert "another" not in str(found.value)
        with RemoteDecoder(server.url, key=KEY) as remote:
            assert len(remote.generate([1, 2], **SHORT).new_token_ids) == 4


def test_a_server_without_sessions_is_named(decoder: SpeculativeDecoder) -> None:
    with running(decoder) as server, pytest.raises(ConfigError, match="--remote-sessions"):
        RemoteDecoder(server.url)


def test_something_else_at_the_address_is_named() -> None:
    with (
        false_server(lambda _path, _body: Made(500), Made(200, {})) as url,
        pytest.raises(ResourceError, match="check the URL"),
    ):
        RemoteDecoder(url)


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (Made(200, b"<html>Please sign in</html>"), r"answers .* cannot be read"),
        (Made(302, b"", {"location": "http://127.0.0.1:1/sign-in"}), "got: status 302"),
    ],
    ids=["a page", "a redirection"],
)
def test_an_answer_of_another_server_is_asked_for_again_and_then_named(
    page: Made, message: str
) -> None:
    traffic = LinkTraffic()
    with (
        false_server(lambda _path, _body: page) as url,
        closing(ServerLink(url, patience=0.1)) as own,
        pytest.raises(ResourceError, match=message) as found,
    ):
        own.open(OPEN, traffic)
    assert "cannot reach" not in str(found.value)
    assert traffic.num_repeats >= 1


def test_an_error_of_a_gateway_ends_no_text(server: Running, decoder: SpeculativeDecoder) -> None:
    def schedule(number: int, _path: str) -> str:
        return GATEWAY if number in (1, 3, 4) else PASSED

    with bad_network(server.root, schedule) as network, RemoteDecoder(network.url) as remote:
        output = remote.generate([1, 2], **SHORT)
    assert output.new_token_ids == decoder.generate([1, 2], **SHORT).new_token_ids
    assert output.traffic.num_repeats == 3


def test_a_session_that_opens_after_the_end_of_its_text_is_ended(server: Running) -> None:
    with closing(ServerLink(server.url)) as own:
        opened = own.open(OPEN, LinkTraffic(has_ended=True))
        with pytest.raises(SessionGone):
            own.submit(opened.session, 1, b"", LinkTraffic())


def test_a_text_can_be_closed_after_its_decoder(server: Running) -> None:
    remote = RemoteDecoder(server.url)
    steps = remote.steps([1, 2], **SHORT)
    next(steps)
    remote.close()
    steps.close()
    assert next(steps, None) is None


def test_no_request_is_sent_again_for_a_text_that_has_ended() -> None:
    traffic = LinkTraffic(has_ended=True)
    with (
        closing(ServerLink("http://127.0.0.1:1")) as own,
        pytest.raises(ResourceError, match="cannot reach the server"),
    ):
        own.open(OPEN, traffic)
    assert traffic.num_calls == 1


@pytest.mark.parametrize("fault", [LOST, UNANSWERED, BUSY])
def test_patience_ends(server: Running, fault: str) -> None:
    def schedule(number: int, _path: str) -> str:
        return fault if number > 2 else PASSED

    with (
        bad_network(server.root, schedule) as network,
        RemoteDecoder(network.url, patience=0.1) as remote,
    ):
        steps = remote.steps([1, 2], **SHORT)
        assert len([next(steps), next(steps)]) == 2
        message = "cannot be read; got: status 503" if fault == BUSY else "cannot reach the server"
        with pytest.raises(ResourceError, match=message):
            next(steps)
