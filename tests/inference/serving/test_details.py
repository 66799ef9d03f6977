"""Details describe the tokens and steps of a stream, and bytes of tokens join to its text."""

import json
import urllib.request
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from helpers.serving import MODEL, Running, running, tiny_decoder
from helpers.tokenizers import spaced_tokenizer, tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from inference import SpeculativeDecoder
from inference.drafters.aded.drafter import AdedDrafter
from inference.drafters.lookup import LookupDrafter
from inference.engine.decode_step import DecodeStep, TokenDetails, VerifiedTree
from inference.protocol import Drafter
from inference.serving.adaptation import Learner
from inference.serving.details import DetailWriter, bytes_of_token

MESSAGES: Any = [{"role": "user", "content": "naïve 漢字 → ü? def main(argument):"}]
TOKENIZER = tiny_tokenizer()
WRITER = DetailWriter(TOKENIZER, ("expert 0",))


def _stream(server: Running, **body: Any) -> list[dict[str, Any]]:
    """Return the chunks of a stream as the server sends them."""
    common = {"model": MODEL, "messages": MESSAGES, "stream": True, "max_tokens": 32, "seed": 3}
    request = urllib.request.Request(
        f"{server.url}/chat/completions",
        json.dumps({**common, **body}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        events = response.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def _details(chunks: Sequence[dict[str, Any]], field: str, index: int = 0) -> list[dict[str, Any]]:
    own = [chunk["jakiro"] for chunk in chunks if "steps" in chunk["jakiro"]]
    return [entry for part in own if part["index"] == index for entry in part[field]]


def _text(chunks: Sequence[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(own["delta"].get("content") or "" for own in choices if own["index"] == index)


OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "logprobs": True, "top_logprobs": 2},
    {"temperature": 0.8, "n": 2, "stop": ["\n", "a"]},
    {"temperature": 1.3, "stream_options": {"include_usage": True}},
    {"temperature": 0.5, "frequency_penalty": 0.5},
]


def _with_details(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "jakiro": {**options.get("jakiro", {}), "details": True}}


@pytest.mark.parametrize("options", OPTIONS)
def test_the_texts_of_the_tokens_are_the_text(server: Running, options: dict[str, Any]) -> None:
    chunks, plain = _stream(server, **_with_details(options)), _stream(server, **options)
    for index in range(options.get("n", 1)):
        tokens = _details(chunks, "tokens", index)
        steps = _details(chunks, "steps", index)
        text = "".join(token["text"] for token in tokens)
        assert text == _text(chunks, index) == _text(plain, index)
        assert sum(step["emitted"] for step in steps) == len(tokens)


def test_steps_add_up_to_the_usage(server: Running) -> None:
    options = {"temperature": 0.9, "stream_options": {"include_usage": True}}
    chunks = _stream(server, **options, jakiro={"details": True})
    usage = chunks[-1]["usage"]
    tokens, steps = _details(chunks, "tokens"), _details(chunks, "steps")
    counts = usage["completion_tokens_details"]
    accepted, drafted = (sum(step[name] for step in steps) for name in ("accepted", "drafted"))
    assert len(tokens) == usage["completion_tokens"]
    assert [step["step"] for step in steps] == list(range(len(steps)))
    assert accepted == counts["accepted_prediction_tokens"]
    assert drafted - accepted == counts["rejected_prediction_tokens"]
    seconds = [step["seconds"] for step in steps]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0


def test_tokens_and_trees_agree(server: Running) -> None:
    chunks = _stream(server, temperature=0.7, jakiro={"details": True})
    tokens = _details(chunks, "tokens")
    for step in _details(chunks, "steps"):
        own = [token for token in tokens if token["step"] == step["step"]]
        nodes = step["tree"]["nodes"]
        path = [node for node in nodes if node["accepted"]]
        assert (len(own), len(nodes)) == (step["emitted"], step["drafted"])
        drafted, others = own[: len(path)], own[len(path) :]
        assert [token["depth"] for token in own] == [*range(1, 1 + len(path)), *[0] * len(others)]
        assert [token["source"] for token in drafted] == [node["source"] for node in path]
        assert {token["source"] for token in others} <= {"target"}
        assert all(node["parent"] < number for number, node in enumerate(nodes))
        assert all(0 <= node["probability"] <= 1 for node in nodes)
    assert {token["source"] for token in tokens} <= {"target", "expert 0", "expert 1"}
    assert any(token["depth"] for token in tokens)


def test_a_request_without_drafts_gets_the_text_of_the_target_alone(server: Running) -> None:
    options = {"temperature": 0, "stream_options": {"include_usage": True}}
    expected = _stream(server, **options)
    found = _stream(server, **options, jakiro={"details": True, "drafting": False})
    assert _text(found) == _text(expected)
    counts = found[-1]["usage"]["completion_tokens_details"]
    assert counts == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert {token["source"] for token in _details(found, "tokens")} == {"target"}
    assert len(_details(found, "steps")) == found[-1]["usage"]["completion_tokens"]


def test_a_probability_that_is_not_a_number_becomes_null() -> None:
    tree = VerifiedTree(1, [2, 3], [-1, -1], [0, 5], [float("nan"), 0.25], [1], None)
    details = TokenDetails([], [], [], tree=tree)
    step = DecodeStep([3], [1], True, details=details, proposer_ids=[0])
    data = WRITER.step(step, 0, ["x"], 0.5)
    nodes = data["steps"][0]["tree"]["nodes"]
    assert [node["probability"] for node in nodes] == [None, 0.25]
    assert [node["source"] for node in nodes] == ["expert 0", "source 5"]
    assert json.dumps(data, allow_nan=False)


def test_rejected_drafts_can_be_hidden() -> None:
    tree = VerifiedTree(1, [5, 6, 7, 8], [-1, -1, 1, 1], [0] * 4, [0.1, 0.2, 0.3, 0.4], [1, 3], 2)
    writer = DetailWriter(TOKENIZER, ["all"])
    whole = writer.tree(tree)
    writer.hides_rejected = True
    shown = writer.tree(tree)
    assert [node["accepted"] for node in whole["nodes"]] == [False, True, False, True]
    assert [node["text"] for node in shown["nodes"]] == [
        TOKENIZER.decode([token]) for token in (6, 8)
    ]
    assert [node["parent"] for node in shown["nodes"]] == [-1, 0]
    assert {**shown, "nodes": None} == {**whole, "nodes": None}


@pytest.mark.parametrize(
    ("keys", "drafter", "is_hidden"),
    [
        (("first-key-1", "second-key-2"), AdedDrafter(), True),
        (("first-key-1", "second-key-2"), LookupDrafter(), False),
        (("first-key-1",), AdedDrafter(), False),
    ],
    ids=["learns", "does not learn", "one user"],
)
def test_drafts_learned_from_other_users_are_hidden(
    keys: tuple[str, ...], drafter: Drafter, is_hidden: bool
) -> None:
    one = tiny_decoder()
    decoder = SpeculativeDecoder(one.target.model, drafter, one.tokenizer, tree="fixed")
    with running(decoder, api_keys=keys) as server:
        assert server.server.service.model.details.hides_rejected == is_hidden


@pytest.mark.slow
def test_drafts_learned_by_versions_in_a_folder_are_hidden(tmp_path: Path) -> None:
    learner, decoder = Learner(("false",), "drafter"), tiny_decoder(trained=True)
    with running(decoder, learner, adapt="shared", adapt_folder=tmp_path / "versions") as server:
        assert server.server.service.model.details.hides_rejected


def _joined(token_ids: list[int]) -> bytes:
    return bytes(chain.from_iterable(bytes_of_token(TOKENIZER, own) or [] for own in token_ids))


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=30))
def test_bytes_join_to_the_text(token_ids: list[int]) -> None:
    text = TOKENIZER.decode(token_ids, skip_special_tokens=True)
    assert _joined(token_ids).decode(errors="replace") == text


def test_tokens_that_are_named_by_their_byte() -> None:
    tokenizer = spaced_tokenizer()
    names = ["<0xC3>", "<0xBC>", "b", "</s>"]
    token_ids = [int(tokenizer.convert_tokens_to_ids(name)) for name in names]
    assert [bytes_of_token(tokenizer, own) for own in token_ids] == [(0xC3,), (0xBC,), (98,), None]
