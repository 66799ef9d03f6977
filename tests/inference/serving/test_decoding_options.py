"""Biases and penalties of a request: the same tokens and distributions as transformers' own."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers.serving import MODEL, Running
from openai import OpenAI
from transformers import LogitsProcessorList

from inference import SpeculativeDecoder
from inference.serving.decoding_options import TokenPenalties

PROMPT = "def main(argument):"
OPTIONS: list[dict[str, Any]] = [
    {"frequency_penalty": 1.5},
    {"presence_penalty": 2.0},
    {"frequency_penalty": -0.4, "presence_penalty": 0.5},
    {"logit_bias": {"5": 3, "7": 2.5, "11": -100}},
    {"logit_bias": {"9": 100}},
    {"logit_bias": {"5": 3}, "frequency_penalty": 0.7},
    {"extra_body": {"repetition_penalty": 1.3}},
    {"presence_penalty": 1.0, "extra_body": {"repetition_penalty": 0.8}},
]


@pytest.fixture(scope="module")
def decoder(server: Running) -> SpeculativeDecoder:
    return server.server.engine.decoder


def _generation(decoder: SpeculativeDecoder, fields: dict[str, Any], length: int) -> dict[str, Any]:
    """Return the arguments of `generate()` for the fields of a request."""
    found: dict[str, Any] = {}
    if "logit_bias" in fields:
        bias = fields["logit_bias"].items()
        found["sequence_bias"] = {(int(token),): float(own) for token, own in bias}
    penalties = [fields.get(f"{name}_penalty", 0.0) for name in ("frequency", "presence")]
    if any(penalties):
        found["logits_processor"] = LogitsProcessorList([TokenPenalties(length, *penalties)])
    own = fields.get("extra_body", {})
    return {**found, **own}


def _reference(decoder: SpeculativeDecoder, fields: dict[str, Any]) -> str:
    """Return the greedy text of transformers' own `generate()`."""
    ids = decoder.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    length = ids.shape[1]
    output = decoder.target.model.generate(
        ids, max_new_tokens=40, do_sample=False, **_generation(decoder, fields, length)
    )
    return str(decoder.tokenizer.decode(output[0, length:], skip_special_tokens=True))


def test_greedy_text_is_that_of_transformers(client: OpenAI, decoder: SpeculativeDecoder) -> None:
    """All requests run together, so each of them must keep its own biases and penalties."""
    expected = [_reference(decoder, fields) for fields in OPTIONS]
    assert len(set(expected)) > 4

    def served(fields: dict[str, Any]) -> str:
        options: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 40, **fields}
        return client.completions.create(temperature=0, **options).choices[0].text

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(served, OPTIONS)) == expected


def _second_tokens(client: OpenAI, first: int, fields: dict[str, Any]) -> list[int]:
    """Return the second tokens of many samples whose first token is a given one."""
    found: list[int] = []
    options: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 1.0, **fields}
    details: Any = {"stream": True, "extra_body": {"jakiro": {"details": True}}}
    for seed in range(40):
        choices: list[list[int]] = [[] for _ in range(8)]
        for chunk in client.completions.create(seed=seed, n=8, max_tokens=2, **details, **options):
            own = chunk.to_dict()["jakiro"]
            if "tokens" in own:
                choices[own["index"]] += [token["id"] for token in own["tokens"]]
        found += [ids[1] for ids in choices if len(ids) == 2 and ids[0] == first]
    return found


def test_sampled_tokens_have_the_distribution_after_the_penalties(
    client: OpenAI, decoder: SpeculativeDecoder
) -> None:
    """The frequencies of the tokens after a likely first token, by a chi-square test."""
    model = decoder.target.model
    ids = decoder.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        first = int(model(ids).logits[0, -1].argmax())
    logits = _raw(model, ids, first).double()
    best = logits.topk(2).indices.tolist()
    other = best[1] if best[0] == first else best[0]
    bias = float(logits[other] - logits[first]) + 1.5  # then, the penalty makes `other` likelier
    logits[first] += bias - 2.0
    probs = logits.softmax(-1)
    fields = {"presence_penalty": 2.0, "logit_bias": {str(first): bias}}
    tokens = _second_tokens(client, first, fields)
    assert len(tokens) > 150
    cells = [tokens.count(first), tokens.count(other)]
    counts = torch.tensor([*cells, len(tokens) - sum(cells)], dtype=torch.float64)
    shares = torch.stack([probs[first], probs[other], 1 - probs[first] - probs[other]])
    expected = len(tokens) * shares
    assert float(expected.min()) > 5
    assert float(((counts - expected) ** 2 / expected).sum()) < 13.8  # 0.1%, 2 degrees of freedom


def _raw(model: Any, ids: torch.Tensor, first: int) -> torch.Tensor:
    """Return the logits after the prompt and its first new token."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.cat([ids, torch.tensor([[first]])], 1)).logits
    return logits[0, -1]


def test_the_chosen_seed_is_named_and_repeats_the_text(client: OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 1.0}
    first = client.completions.create(max_tokens=20, **options)
    seed = first.to_dict()["jakiro"]["seed"]
    assert 0 <= seed < 2**53
    again = client.completions.create(max_tokens=20, seed=seed, **options)
    assert again.choices[0].text == first.choices[0].text
    assert again.to_dict()["jakiro"] == {"seed": seed}
    other = client.completions.create(max_tokens=20, **options)
    assert other.to_dict()["jakiro"]["seed"] != seed
    chunks = list(client.completions.create(max_tokens=20, seed=-5, stream=True, **options))
    assert {chunk.to_dict()["jakiro"]["seed"] for chunk in chunks} == {-5}


def test_only_new_tokens_are_penalized() -> None:
    penalties = TokenPenalties(2, frequency=0.5, presence=0.25)
    ids = torch.tensor([[1, 3, 1, 1, 2], [0, 0, 3, 0, 3]])
    scores = torch.zeros(2, 4)
    found = penalties(ids, scores)
    expected = [[0.0, -1.25, -0.75, 0.0], [-0.75, 0.0, 0.0, -1.25]]
    assert torch.equal(found, torch.tensor(expected))
    assert torch.equal(scores, torch.zeros(2, 4))
