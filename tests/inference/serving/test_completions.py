"""`/v1/completions` with OpenAI's own client, over a socket."""

from typing import Any

import pytest
import torch
from helpers.models import tiny_llama
from helpers.quick import mostly_slow
from helpers.serving import MODEL, Running, deltas, running
from helpers.tokenizers import spaced_tokenizer
from openai import OpenAI

from inference import SpeculativeDecoder
from inference.drafters.lookup import LookupDrafter

PROMPT = "def main(argument):"
SAMPLED = {"temperature": 0.9, "seed": 7, "max_tokens": 16}
GREEDY = {"temperature": 0, "max_tokens": 16}


@pytest.fixture(scope="module")
def decoder(server: Running) -> SpeculativeDecoder:
    return server.server.engine.decoder


def _text(decoder: SpeculativeDecoder, prompt: Any, options: dict[str, Any]) -> str:
    """Return the text that the decoder generates alone."""
    given = {"max_new_tokens" if key == "max_tokens" else key: own for key, own in options.items()}
    return decoder.generate(prompt, **given).text or ""


def test_greedy_text_is_that_of_the_target(client: OpenAI, decoder: SpeculativeDecoder) -> None:
    ids = decoder.tokenizer(PROMPT, return_tensors="pt")
    output = decoder.target.model.generate(**ids, max_new_tokens=16, do_sample=False)
    expected = decoder.tokenizer.decode(
        output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True
    )
    found = client.completions.create(model=MODEL, prompt=PROMPT, **GREEDY)
    assert found.choices[0].text == expected
    assert found.choices[0].finish_reason == "length"
    assert found.object == "text_completion"
    chunks = list(client.completions.create(model=MODEL, prompt=PROMPT, stream=True, **GREEDY))
    assert deltas(chunks) == expected
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"


def test_choices_are_those_of_a_batch_with_the_same_seed(
    client: OpenAI, decoder: SpeculativeDecoder
) -> None:
    batch = decoder.generate_batch([PROMPT] * 3, temperature=0.9, seed=7, max_new_tokens=16)
    expected = [output.text for output in batch]
    found = client.completions.create(model=MODEL, prompt=PROMPT, n=3, **SAMPLED)
    assert [choice.text for choice in found.choices] == expected
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    assert len(set(expected)) == 3
    assert found.usage is not None
    assert found.usage.prompt_tokens == len(decoder.tokenizer(PROMPT)["input_ids"])
    assert found.usage.completion_tokens == 48


def test_several_prompts_are_answered_in_their_order(
    client: OpenAI, decoder: SpeculativeDecoder
) -> None:
    prompts = [PROMPT, "print("]
    found = client.completions.create(model=MODEL, prompt=prompts, **GREEDY)
    assert [own.text for own in found.choices] == [
        _text(decoder, prompt, GREEDY) for prompt in prompts
    ]
    ids = [list(decoder.tokenizer(prompt)["input_ids"]) for prompt in prompts]
    assert [
        own.text for own in client.completions.create(model=MODEL, prompt=ids, **GREEDY).choices
    ] == [own.text for own in found.choices]


@pytest.mark.parametrize("seed", mostly_slow(range(6), quick=[3]))
def test_text_ends_before_a_stop_string(
    client: OpenAI, decoder: SpeculativeDecoder, seed: int
) -> None:
    options = {**SAMPLED, "seed": seed, "max_tokens": 40}
    whole = _text(decoder, PROMPT, options)
    stop = whole[9:12]
    expected = whole[: whole.index(stop)]
    found = client.completions.create(model=MODEL, prompt=PROMPT, stop=stop, **options)
    assert found.choices[0].text == expected
    assert found.choices[0].finish_reason == "stop"
    stream = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        stop=["never", stop],
        stream=True,
        stream_options={"include_usage": True},
        **options,
    )
    chunks = list(stream)
    assert deltas(chunks) == expected
    assert chunks[-1].usage == found.usage
    assert found.usage is not None
    assert found.usage.completion_tokens < 40


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_log_probs_are_those_of_the_target(
    client: OpenAI, decoder: SpeculativeDecoder, temperature: float
) -> None:
    found = client.completions.create(
        model=MODEL, prompt=PROMPT, logprobs=3, temperature=temperature, seed=3, max_tokens=12
    )
    alone = decoder.generate(PROMPT, temperature=temperature, seed=3, max_new_tokens=12)
    ids = alone.sequences
    with torch.no_grad():
        logits = decoder.target.model(ids).logits[0]
    expected = logits.double().log_softmax(-1)
    start = ids.shape[1] - 12
    own = found.choices[0].logprobs
    assert own is not None
    assert own.token_logprobs is not None
    assert own.top_logprobs is not None
    assert own.tokens == [decoder.tokenizer.decode([token]) for token in ids[0, start:]]
    for number, token in enumerate(ids[0, start:].tolist()):
        row = expected[start + number - 1]
        assert own.token_logprobs[number] == pytest.approx(float(row[token]), abs=1e-4)
        assert max(own.top_logprobs[number].values()) == pytest.approx(float(row.max()), abs=1e-4)
    text = found.choices[0].text
    assert own.text_offset is not None
    for offset, token in zip(own.text_offset, own.tokens, strict=True):
        assert "\N{REPLACEMENT CHARACTER}" in token or text[offset:].startswith(token)
    chunks = list(
        client.completions.create(
            model=MODEL,
            prompt=PROMPT,
            logprobs=3,
            temperature=temperature,
            seed=3,
            max_tokens=12,
            stream=True,
        )
    )
    streamed = [
        value for chunk in chunks for value in chunk.choices[0].logprobs.token_logprobs or ()
    ]
    assert streamed == own.token_logprobs


def test_a_text_keeps_the_space_after_its_prompt() -> None:
    tokenizer = spaced_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}a{% endfor %}"
    model = tiny_llama(vocab=len(tokenizer))
    decoder = SpeculativeDecoder(model, LookupDrafter(), tokenizer, tree="fixed")
    bias = {str(tokenizer.convert_tokens_to_ids("▁b")): 100}
    options: dict[str, Any] = {"model": MODEL, "temperature": 0, "logit_bias": bias}
    with running(decoder, capacity=64) as server, server.client() as client:
        for prompt in ("a", tokenizer("a")["input_ids"]):
            given = options | {"prompt": prompt, "max_tokens": 2}
            assert client.completions.create(**given).choices[0].text == " b b"
            assert deltas(list(client.completions.create(**given, stream=True))) == " b b"
        stopped = client.completions.create(**options, prompt="a", stop=" b", max_tokens=9)
        assert stopped.choices[0].text == ""
        assert stopped.usage is not None
        assert stopped.usage.completion_tokens == 1
        messages: Any = [{"role": "user", "content": "a"}]
        given = {**options, "messages": messages, "max_tokens": 3}
        assert client.chat.completions.create(**given).choices[0].message.content == "b b b"
        chat = client.chat.completions.create(**given, stop=" b").choices[0]
        assert (chat.message.content, chat.finish_reason) == ("b", "stop")
