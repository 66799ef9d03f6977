"""Texts that are drafted here and verified by a server are those of a decoder alone."""

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from helpers.remote import QuantizedDrafter
from helpers.serving import Running

from inference import SpeculativeDecoder
from inference.device import RemoteDecoder
from inference.drafters.aded.drafter import AdedDrafter
from inference.drafters.lookup import LookupDrafter
from inference.drafters.small_lm import SmallLMDrafter, SmallLMSettings
from inference.outputs import GenerateOutput
from jakiro.errors import PromptError

PROMPT = [5, 6, 7, 5, 6, 7, 5]
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0, "max_new_tokens": 40},
    {"temperature": 0.7, "top_k": 2, "seed": 11, "max_new_tokens": 40},
    {"temperature": 1, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "seed": 3, "max_new_tokens": 9},
]


@pytest.fixture(scope="module")
def remote(server: Running) -> Iterator[RemoteDecoder]:
    with RemoteDecoder(server.url, LookupDrafter()) as found:
        yield found


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_text_is_that_of_the_decoder_alone(
    decoder: SpeculativeDecoder, remote: RemoteDecoder, options: dict[str, Any]
) -> None:
    output, alone = remote.generate(PROMPT, **options), decoder.generate(PROMPT, **options)
    assert output.sequences.tolist() == alone.sequences.tolist()
    assert (output.text, output.depths) == (alone.text, alone.depths)
    for name in ("emitted", "target_forwards", "accepted", "reached", "proposed_by_proposer"):
        assert getattr(output.stats, name) == getattr(alone.stats, name)
    assert output.traffic.num_calls == 1 + output.stats.target_forwards
    assert min(output.traffic.bytes_up, output.traffic.bytes_down) > 0
    assert output.stats.tau > 1 or options["temperature"] == 1


def test_a_device_without_a_drafter_gets_the_text_of_the_target(
    decoder: SpeculativeDecoder, server: Running
) -> None:
    with RemoteDecoder(server.url) as remote:
        output = remote.generate(PROMPT, temperature=0, max_new_tokens=9)
    alone = decoder.generate(PROMPT, temperature=0, max_new_tokens=9)
    assert (output.new_token_ids, output.stats.tau) == (alone.new_token_ids, 1)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_sampled_trees_of_a_small_model_are_verified_as_on_one_machine(
    decoder: SpeculativeDecoder, server: Running, options: dict[str, Any]
) -> None:
    model: Any = decoder.target.model
    drafter = SmallLMDrafter(model, model, SmallLMSettings(depth=2, children=2, breadth=2))
    alone = SpeculativeDecoder(model, QuantizedDrafter(drafter), decoder.tokenizer, tree="fixed")
    expected = alone.generate(PROMPT, **options)
    with RemoteDecoder(server.url, drafter) as remote:
        output = remote.generate(PROMPT, **options)
    assert output.new_token_ids == expected.new_token_ids
    assert output.depths == expected.depths
    assert output.stats.tau > 1.2


def test_a_drafter_that_learns_gets_other_random_numbers_for_each_text(
    decoder: SpeculativeDecoder, server: Running
) -> None:
    options: dict[str, Any] = {"temperature": 1, "seed": 4, "max_new_tokens": 12}
    drafter = AdedDrafter()
    with RemoteDecoder(server.url, drafter) as remote:
        texts = [remote.generate(PROMPT, **options).new_token_ids for _ in range(2)]
        drafter.reset()
        again = remote.generate(PROMPT, **options).new_token_ids
        greedy = [
            remote.generate(PROMPT, temperature=0, max_new_tokens=20).new_token_ids
            for _ in range(2)
        ]
    assert texts[0] != texts[1]
    assert texts[0] == again
    alone = decoder.generate(PROMPT, temperature=0, max_new_tokens=20).new_token_ids
    assert greedy == [alone, alone]


def test_a_seed_repeats_the_text_of_a_drafter_that_learns(server: Running) -> None:
    options: dict[str, Any] = {"temperature": 1, "max_new_tokens": 12}

    def second_text(seed: int | None) -> GenerateOutput:
        with RemoteDecoder(server.url, AdedDrafter()) as remote:
            remote.generate([1, 2, 3], seed=5, **options)
            return remote.generate([4, 5, 6], seed=seed, **options)

    first = second_text(None)
    assert second_text(first.seed).new_token_ids == first.new_token_ids


@pytest.mark.parametrize(
    "prompt", ["some words, some words", [{"role": "user", "content": "hello"}]], ids=str
)
def test_texts_and_chats_are_encoded_by_the_server(
    decoder: SpeculativeDecoder, remote: RemoteDecoder, prompt: Any
) -> None:
    alone = decoder.generate(prompt, temperature=0, max_new_tokens=12)
    pieces = list(remote.stream(prompt, temperature=0, max_new_tokens=12))
    assert "".join(pieces) == alone.text
    output = remote.generate(prompt, temperature=0, max_new_tokens=12)
    assert output.sequences.tolist() == alone.sequences.tolist()


def test_a_text_ends_before_a_stop_string(remote: RemoteDecoder) -> None:
    whole = remote.generate(PROMPT, temperature=0, max_new_tokens=40).text or ""
    stop = whole[8:11]
    found = remote.generate(PROMPT, temperature=0, max_new_tokens=40, stop=[stop])
    assert found.text == whole[: whole.find(stop)]
    assert found.stats.emitted < 40


def test_the_session_of_a_text_that_is_not_read_to_its_end_is_closed(
    server: Running, remote: RemoteDecoder
) -> None:
    def num_sessions() -> int:
        page = httpx2.get(f"{server.root}/metrics").text
        return int(float(page.partition("\njakiro_remote_sessions ")[2].split()[0]))

    steps = remote.steps(PROMPT, temperature=0, max_new_tokens=100)
    next(steps)
    assert num_sessions() == 1
    steps.close()
    assert num_sessions() == 0


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (PROMPT, {"temperature": -1.0}, "temperature cannot be used"),
        (PROMPT, {"max_new_tokens": 5000}, "longer than a sequence may be"),
        ([10**6], {}, "outside the target's vocabulary"),
        ([{"role": "tool", "content": "x"}], {}, "role cannot be used"),
    ],
)
def test_what_cannot_be_used_is_named(
    remote: RemoteDecoder, prompt: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(PromptError, match=message):
        remote.generate(prompt, **options)
