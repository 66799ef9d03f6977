"""A hub that cannot be reached is not asked again and again."""

import socket

import pytest
from huggingface_hub import constants

from jakiro.errors import CheckpointError
from jakiro.utils.hub import is_hub_reachable
from jakiro.utils.pretrained import load_causal_lm, load_config, load_tokenizer


def test_a_hub_that_cannot_be_reached_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def unknown(host: object, *_: object) -> None:
        asked.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    is_hub_reachable.cache_clear()
    for load in (load_causal_lm, load_config, load_tokenizer):
        with pytest.raises(CheckpointError, match=r"no such folder.*no connection to the hub"):
            load("nobody/nothing")
    assert len(asked) <= 2  # once here, and once by the library for its description of the caller
    is_hub_reachable.cache_clear()
