"""Paths differ from ids on the hub, and a hub out of reach is not asked again and again."""

import socket
import time
from pathlib import Path

import pytest

from jakiro.errors import CheckpointError
from jakiro.utils import hub
from jakiro.utils.hub import is_hub_reachable, refuse_missing_folder
from jakiro.utils.pretrained import load_causal_lm, load_config, load_tokenizer


@pytest.mark.parametrize("name", ["/nope", "./nope", "../nope/a", "~/nope", "a/b/c", "runs/nope"])
def test_a_path_of_a_missing_folder_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"a path at which nothing exists.*try again"):
        refuse_missing_folder(name, "the target", "try again")


@pytest.mark.parametrize("name", ["gpt2", "meta-llama/Llama-3.1-8B", "runs", "runs/there"])
def test_hub_ids_and_folders_are_not_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs" / "there").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    refuse_missing_folder(name, "the target", "try again")


def test_a_hub_that_cannot_be_reached_is_not_asked_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []

    def unknown(host: object, *_: object) -> None:
        asked.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    hub._answers.cache_clear()
    started = time.monotonic()
    for load in (load_causal_lm, load_config, load_tokenizer):
        with pytest.raises(CheckpointError, match=r"no such folder.*no connection to https"):
            load("nobody/nothing")
    assert time.monotonic() - started < 10
    assert len(asked) == 1
    hub._answers.cache_clear()


def test_a_proxy_is_asked_in_place_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        for proxy in (address, f"http://{address}"):
            monkeypatch.setenv("https_proxy", proxy)
            assert is_hub_reachable()
        monkeypatch.delenv("https_proxy")
        monkeypatch.setenv("all_proxy", address)
        assert is_hub_reachable()
        monkeypatch.delenv("all_proxy")
        monkeypatch.setenv("https_proxy", address)
    hub._answers.cache_clear()
    assert not is_hub_reachable()  # nothing listens there any more
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:none")
    assert not is_hub_reachable()
