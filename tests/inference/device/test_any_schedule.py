"""Any schedule of lost messages, lost sessions and restarted servers gives the same text."""

from collections.abc import Iterator
from copy import deepcopy
from random import Random
from typing import Any

import httpx2
import pytest
import torch
from helpers.bad_network import FAULTS, PASSED, BadNetwork, bad_network
from helpers.quick import mostly_slow
from helpers.serving import Running, drafter_apart, running, trained_decoder

from inference import SpeculativeDecoder
from inference.device import RemoteDecoder
from inference.device.offline_text import OfflineOutput, OfflineWriting
from inference.drafters.lookup import LookupDrafter
from inference.drafters.small_lm import SmallLMDrafter, SmallLMSettings
from inference.protocol import Drafter

PROMPT = [1 + index % 50 for index in range(300)]  # its memory is fetched in two parts
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "max_new_tokens": 12},
    "sampled": {"temperature": 0.7, "top_k": 2, "seed": 11, "max_new_tokens": 12},
}
TRUNKS: dict[str, dict[str, Any]] = {
    "moa": {},
    "feedback": {"trunk": {"kind": "feedback", "fusion_layers": (0, 2)}},
    "hybrid": {"trunk": {"kind": "hybrid"}},
}
NOW = OfflineWriting(after_seconds=0.0)
GONE, STARTED_AGAIN = "gone", "started again"  # the session is lost, or all that a server knows


class Pair:
    """Two servers of the same target, each of which can take the place of the other."""

    def __init__(self, decoder: SpeculativeDecoder, servers: tuple[Running, Running]) -> None:
        self.decoder, self.servers = decoder, servers

    def schedule(self, seed: int, network: list[BadNetwork]) -> Any:
        """Return a random schedule of faults."""
        random, share = Random(seed), (0.5, 0.3, 0.7)[seed % 3]

        def fault_of(number: int, path: str) -> str:
            if number == 0 or random.random() > share:  # the first request is not repeated
                return PASSED
            fault = random.choice([*FAULTS, GONE, GONE, STARTED_AGAIN])
            if fault == STARTED_AGAIN:
                network[0].server = random.choice(self.servers).root
            elif fault == GONE and path.count("/") > 3:
                httpx2.delete(network[0].server + "/".join(path.split("/")[:5]))
            return fault if fault in FAULTS else PASSED

        return fault_of

    def written(self, seed: int | None, drafter: Drafter | None, options: Any, offline: Any) -> Any:
        """Return the text over a network with these faults; without any for no seed."""
        network = list[BadNetwork]()
        schedule = (lambda *_: PASSED) if seed is None else self.schedule(seed, network)
        with bad_network(self.servers[0].root, schedule) as bad:
            network.append(bad)
            with RemoteDecoder(bad.url, drafter, patience=60.0, offline=offline) as remote:
                return remote.generate(PROMPT, **options)


@pytest.fixture(
    scope="module",
    params=["moa", *(pytest.param(name, marks=pytest.mark.slow) for name in list(TRUNKS)[1:])],
)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Two servers, each with a trained drafter."""
    decoder = trained_decoder(**TRUNKS[request.param])
    settings: dict[str, Any] = {
        "remote_sessions": 64,
        "remote_idle_seconds": 2.0,
    }
    settings |= {"capacity": 400}
    with running(decoder, **settings) as first, running(decoder, **settings) as second:
        yield Pair(decoder, (first, second))


def _drafter(kind: str, pair: Pair) -> Drafter:
    if kind == "lookup":
        return LookupDrafter()
    if kind == "trained":
        return drafter_apart(pair.decoder)
    model: Any = pair.decoder.target.model
    if kind == "the target":
        return SmallLMDrafter(model, model, SmallLMSettings(depth=2, children=2, breadth=2))
    similar, generator = deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in similar.parameters():
            weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=generator)
    return SmallLMDrafter(similar, model, SmallLMSettings(depth=2, children=2, breadth=2))


def _num_lost(outputs: list[Any]) -> int:
    """Return how many requests and sessions were lost."""
    return sum(own.traffic.num_repeats + own.traffic.num_resumes for own in outputs)


@pytest.mark.parametrize("mode", OPTIONS)
@pytest.mark.parametrize("kind", ["lookup", "small", "trained"])
@pytest.mark.parametrize("seeds", mostly_slow([(0, 2), (2, 20)], quick=[(0, 2)]))
def test_a_text_that_waits_is_the_text_over_a_good_network(
    pair: Pair, kind: str, mode: str, seeds: tuple[int, int]
) -> None:
    drafter = _drafter(kind, pair)
    expected = pair.written(None, drafter, OPTIONS[mode], None)
    outputs = [pair.written(seed, drafter, OPTIONS[mode], None) for seed in range(*seeds)]
    for output in outputs:
        assert (output.new_token_ids, output.text) == (expected.new_token_ids, expected.text)
        assert output.depths == expected.depths
        assert output.stats.accepted == expected.stats.accepted
    assert _num_lost(outputs) > 0


@pytest.mark.parametrize("kind", ["lookup", "small", "the target", "trained"])
@pytest.mark.parametrize("seeds", mostly_slow([(0, 2), (2, 20)], quick=[(0, 2)]))
def test_greedy_text_that_was_written_alone_is_replaced_by_the_targets(
    pair: Pair, kind: str, seeds: tuple[int, int]
) -> None:
    expected = pair.written(None, None, OPTIONS["greedy"], None)
    drafter, written = _drafter(kind, pair), 0
    outputs: list[OfflineOutput] = []
    for seed in range(*seeds):
        output = pair.written(seed, drafter, OPTIONS["greedy"], NOW)
        assert (output.new_token_ids, output.text) == (expected.new_token_ids, expected.text)
        counts = output.provisional
        assert counts.num_written == counts.num_kept + counts.num_retracted
        written += counts.num_written
        outputs.append(output)
    assert _num_lost(outputs) > 0
    assert written > 0 or kind == "lookup"
    assert kind != "the target" or any(output.provisional.num_kept for output in outputs)
