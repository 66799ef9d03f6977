"""Texts that trained drafters draft here, with the memory that a server encodes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import numpy as np
import pytest
from helpers.bad_network import PASSED, bad_network
from helpers.models import tiny_drafter, tiny_settings
from helpers.remote import QuantizedDrafter
from helpers.serving import Running, drafter_apart, running, trained_decoder

from inference import SpeculativeDecoder
from inference.device import RemoteDecoder
from inference.device.text import RemoteOutput
from inference.drafters.trained.drafter import TrainedDrafter
from inference.remote.messages import RowEncoding
from inference.serving.verification_session import MemorySource
from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError, TargetMismatch

PROMPT = [5, 6, 7, 5, 6, 7, 5]
KINDS: dict[str, dict[str, Any]] = {
    "moa": {},
    "moa of hidden states": {"source": "hidden"},
    "feedback": {"trunk": {"kind": "feedback"}},
    "fused feedback": {"trunk": {"kind": "feedback", "fusion_layers": (0, 2)}},
    "hybrid": {"trunk": {"kind": "hybrid"}},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_new_tokens": 24},
    "sampled": {"temperature": 0.7, "top_k": 4, "seed": 11, "max_new_tokens": 24},
}
FEW: dict[str, dict[str, Any]] = {
    mode: {**own, "max_new_tokens": 7} for mode, own in OPTIONS.items()
}


def _alone(decoder: SpeculativeDecoder, options: dict[str, Any]) -> RemoteOutput:
    """Return the output of one machine whose drafts are quantized, as on a device."""
    own = QuantizedDrafter(drafter_apart(decoder))
    alone = SpeculativeDecoder(decoder.target.model, own, decoder.tokenizer, tree="fixed")
    return alone.generate(PROMPT, **options)  # type: ignore[return-value]


@contextmanager
def _remote(decoder: SpeculativeDecoder, url: str, **options: Any) -> Iterator[RemoteDecoder]:
    with RemoteDecoder(url, drafter_apart(decoder), patience=20.0, **options) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_exact_rows_give_the_drafts_of_one_machine(kind: str) -> None:
    decoder = trained_decoder(**KINDS[kind])
    with running(decoder, remote_sessions=2) as server, _remote(decoder, server.url) as remote:
        for options in OPTIONS.values():
            output, alone = remote.generate(PROMPT, **options), _alone(decoder, options)
            assert output.new_token_ids == alone.new_token_ids
            assert output.depths == alone.depths
            assert output.stats.accepted == alone.stats.accepted
            # one call for the prompt's memory, and none for that of other tokens
            assert output.traffic.num_calls == 2 + output.stats.target_forwards


@pytest.mark.parametrize("encoding", ["bf16", "int8"])
def test_greedy_text_is_the_same_with_less_precise_rows(
    moa: SpeculativeDecoder, moa_server: Running, encoding: RowEncoding
) -> None:
    options = OPTIONS["greedy"]
    with _remote(moa, moa_server.url) as remote:
        exact = remote.generate(PROMPT, **options)
    with _remote(moa, moa_server.url, memory=encoding) as remote:
        output = remote.generate(PROMPT, **options)
    assert output.new_token_ids == exact.new_token_ids
    assert output.traffic.bytes_down < exact.traffic.bytes_down


def test_a_drafter_with_other_encoders_is_refused(
    moa: SpeculativeDecoder, moa_server: Running
) -> None:
    other = tiny_drafter(moa.target, tiny_settings(), seed=5)
    with (
        RemoteDecoder(moa_server.url, TrainedDrafter.for_target(other, moa.target)) as remote,
        pytest.raises(TargetMismatch, match="is another one than the server's"),
    ):
        remote.generate(PROMPT)


def test_a_server_without_a_trained_drafter_is_named(
    server: Running, decoder: SpeculativeDecoder
) -> None:
    drafter: JakiroDrafter = tiny_drafter(decoder.target)
    with pytest.raises(ConfigError, match="encodes no memory for a trained drafter"):
        RemoteDecoder(server.url, TrainedDrafter.for_target(drafter, decoder.target))


def test_a_drafter_with_layers_of_the_target_is_refused(
    moa: SpeculativeDecoder, moa_server: Running
) -> None:
    own = tiny_drafter(moa.target, tiny_settings(tail_layers=1, combine="sum", parallel_levels=0))
    with pytest.raises(ConfigError, match="the target's last layers, which stay on the server"):
        RemoteDecoder(moa_server.url, TrainedDrafter.for_target(own, moa.target))


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("from=0&to=7", 200),
        ("from=0&to=8", 400),
        ("from=-1&to=4", 400),
    ],
)
def test_only_the_memory_of_verified_tokens_is_sent(
    moa: SpeculativeDecoder, moa_server: Running, query: str, code: int
) -> None:
    asked: list[httpx2.Response] = []

    def ask(number: int, path: str) -> str:
        if path.partition("?")[0].endswith("/memory") and number == 2:
            base = moa_server.root + path.partition("?")[0]
            asked.append(httpx2.get(f"{base}?{query}"))
        return PASSED

    with bad_network(moa_server.root, ask) as network, _remote(moa, network.url) as remote:
        remote.generate(PROMPT, **FEW["greedy"])
    assert [own.status_code for own in asked] == [code]


@pytest.mark.parametrize(("mode", "encoding"), [("greedy", "exact"), ("sampled", "int8")])
def test_memory_that_is_no_number_does_not_end_a_text(
    moa: SpeculativeDecoder,
    moa_server: Running,
    mode: str,
    encoding: RowEncoding,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = MemorySource.rows

    def rows(*arguments: Any) -> Any:
        return np.full_like(own(*arguments), 255)  # not a number in every dtype

    monkeypatch.setattr(MemorySource, "rows", rows)
    with _remote(moa, moa_server.url, memory=encoding) as remote:
        output = remote.generate(PROMPT, **FEW[mode])
    assert len(output.new_token_ids) == 7
    if mode == "greedy":
        assert output.new_token_ids == moa.generate(PROMPT, **FEW[mode]).new_token_ids
