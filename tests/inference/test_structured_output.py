"""Texts that follow a grammar, with and without drafts, through the public interface."""

import json
import re
from random import Random
from typing import Any

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama
from helpers.schemas import fits, random_schema
from helpers.tokenizers import tiny_tokenizer
from llguidance import LLMatcher, LLParserLimits
from llguidance.hf import from_tokenizer
from pydantic import BaseModel
from transformers import LogitsProcessorList

from inference import SpeculativeDecoder
from inference.ahead import AheadDecoder
from inference.conversation import Conversation
from inference.device.decoder import _request
from inference.drafters.lookup import LookupDrafter
from inference.drafters.repeating import RepeatingDrafter
from inference.drafters.small_lm import SmallLMDrafter
from inference.protocol import Drafter
from inference.sampling.grammar import GrammarProcessor
from jakiro.drafter import JakiroDrafter
from jakiro.errors import NumericalError, PromptError
from jakiro.target.adapter import TargetAdapter

TOKENIZER = tiny_tokenizer()
PADDED = len(TOKENIZER) + 13  # size of the target's vocabulary
MODEL = tiny_llama(PADDED, max_position_embeddings=1024, eos_token_id=0)
PROMPT = '{"a": 1, "tags": ["red"]} and '
NUM_TOKENS = 400


def _decoder(drafter: Drafter | JakiroDrafter | None = None, **options: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder(MODEL, drafter, TOKENIZER, tree="fixed", **options)


def _drafters() -> dict[str, Drafter | JakiroDrafter]:
    small = tiny_llama(PADDED, max_position_embeddings=1024, num_hidden_layers=1, seed=2)
    return {
        "trained": tiny_drafter(TargetAdapter(MODEL)),
        "lookup": LookupDrafter(),
        "repeating": RepeatingDrafter(LookupDrafter()),
        "small": SmallLMDrafter(small, MODEL),
    }


def _texts(decoder: SpeculativeDecoder, grammars: list[Any], temperature: float) -> list[str]:
    """Return the texts of sequences with these grammars, which are decoded together."""
    options: dict[str, Any] = {"temperature": temperature, "max_new_tokens": NUM_TOKENS}
    run = decoder.start([PROMPT], seed=1, grammar=grammars[0], **options)
    for number, grammar in enumerate(grammars[1:]):
        decoder.admit(run, [PROMPT], seed=[number], grammar=grammar, **options)
    run.finish()
    return [
        str(TOKENIZER.decode(state.new_token_ids, skip_special_tokens=True))
        for state in run.sequences
    ]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("trained", 10),
        pytest.param("trained", 200, marks=pytest.mark.slow),
        pytest.param("lookup", 200, marks=pytest.mark.slow),
    ],
)
def test_drafts_change_no_greedy_text_and_every_text_fits_its_schema(name: str, count: int) -> None:
    random = Random(count)
    drafter = _drafters()[name]
    for _ in range(0, count, 10):
        schemas = [random_schema(random) for _ in range(10)]
        alone, drafted = (
            _texts(decoder, [*schemas, None], 0) for decoder in (_decoder(), _decoder(drafter))
        )
        assert drafted == alone
        sampled = _texts(_decoder(drafter), schemas, 1)
        for schema, *texts in zip(schemas, drafted, sampled, strict=False):
            assert all(fits(json.loads(text), schema) for text in texts), (schema, texts)


class Person(BaseModel):
    """A class with a JSON schema."""

    age: int
    is_tall: bool


@pytest.mark.parametrize("name", ["trained", "repeating", "small"])
def test_all_kinds_of_grammars_and_drafters(name: str) -> None:
    decoder, plain = _decoder(_drafters()[name]), _decoder()
    grammars: dict[Any, str] = {
        Person: r'\{\s*"age"\s*:\s*-?\d+\s*,\s*"is_tall"\s*:\s*(true|false)\s*\}',
        re.compile("YES|no[0-9]{1,3}", re.IGNORECASE): "(?i:yes|no[0-9]{1,3})",
        'start: "a" inner\ninner: "b" | "(" inner ")"': r"a\(*b\)*",
    }
    for grammar, expected in grammars.items():
        options = {"temperature": 0, "max_new_tokens": 60, "grammar": grammar}
        output, other = (one.generate(PROMPT, **options) for one in (decoder, plain))
        assert output.new_token_ids == other.new_token_ids
        if len(output.new_token_ids) < 60:
            assert re.fullmatch(expected, str(output.text))


SCHEMA = {"type": "object", "properties": {"a": {"enum": [12345, "xy"]}}, "required": ["a"]}
SCHEMA |= {"additionalProperties": False}
OPTIONS: dict[str, Any] = {"temperature": 0, "max_new_tokens": 100, "grammar": SCHEMA}


def test_other_ways_to_decode_give_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _decoder().generate(PROMPT, **OPTIONS)
    drafter = tiny_drafter(TargetAdapter(MODEL))
    decoder = _decoder(drafter)
    grammar = GrammarProcessor.compile(SCHEMA, TOKENIZER)
    ids = TOKENIZER(PROMPT, return_tensors="pt")
    by_transformers = MODEL.generate(
        **ids,
        custom_generate=decoder,
        logits_processor=LogitsProcessorList([grammar]),
        do_sample=False,
        max_new_tokens=100,
        pad_token_id=0,
    )
    assert torch.equal(by_transformers, expected.sequences)
    assert _decoder(drafter, captured=True).generate(PROMPT, **OPTIONS).text == expected.text
    small = SmallLMDrafter(tiny_llama(PADDED, seed=2, num_hidden_layers=1), MODEL)
    ahead = AheadDecoder(MODEL, small, TOKENIZER, tree="fixed")
    assert ahead.generate(PROMPT, **OPTIONS).text == expected.text
    assert "".join(decoder.stream(PROMPT, **OPTIONS)) == expected.text
    pair = decoder.generate_batch([PROMPT, PROMPT + "more "], log_probs=True, **OPTIONS)
    assert pair[0].text == expected.text
    assert sum(pair[0].log_probs or [1]) <= 0
    with Conversation() as conversation:
        first = decoder.generate(PROMPT, conversation=conversation, **OPTIONS)
        longer = PROMPT + str(first.text) + " and "
        second = decoder.generate(longer, conversation=conversation, **OPTIONS)
    assert first.text == expected.text
    assert second.text == _decoder().generate(longer, **OPTIONS).text


def test_a_text_ends_with_its_grammar() -> None:
    decoder = _decoder(LookupDrafter())
    word = re.compile("ab+c")
    for changes in ({"min_new_tokens": 50}, {"eos_token_id": None}, {"eos_token_id": [0, 1]}):
        output = decoder.generate(PROMPT, **OPTIONS | {"grammar": word, **changes})
        is_full = len(output.new_token_ids) == OPTIONS["max_new_tokens"]
        assert is_full or str(output.text).endswith("c")
        assert re.fullmatch("ab*c?", str(output.text))
    output = decoder.generate(PROMPT, **OPTIONS | {"stop_strings": ["a"]})
    assert output.text == decoder.generate(PROMPT, **OPTIONS).text.partition("a")[0] + "a"


def test_an_end_token_is_no_part_of_a_grammar() -> None:
    """The text of a token that ends texts may fit the grammar; the token ends it nevertheless."""
    (end,) = TOKENIZER.encode("x")
    output = _decoder().generate(
        PROMPT, **OPTIONS | {"grammar": re.compile("(x|y){3}"), "eos_token_id": end}
    )
    assert output.text == "yyy"


def test_without_a_tokenizer_and_on_other_machines_there_are_no_grammars() -> None:
    with pytest.raises(PromptError, match="no tokenizer"):
        SpeculativeDecoder(MODEL).generate([1, 2], grammar=SCHEMA)
    with pytest.raises(PromptError, match="grammar cannot be used"):
        _request("a", 1, grammar=SCHEMA)


def test_a_limit_of_the_matcher_is_the_error_of_its_sequence() -> None:
    """Drafts meet the limit before the text does, and leave it to the text."""
    grammar = GrammarProcessor.compile(SCHEMA, TOKENIZER)
    text = LLMatcher.grammar_from_json_schema(SCHEMA)
    limits = LLParserLimits(step_lexer_fuel=1)
    grammar._start = LLMatcher(from_tokenizer(TOKENIZER), text, log_level=0, limits=limits)
    decoder = _decoder(tiny_drafter(TargetAdapter(MODEL)))
    options = OPTIONS | {"grammar": None, "logits_processor": LogitsProcessorList([grammar])}
    with pytest.raises(NumericalError, match="leave no token"):
        decoder.generate(PROMPT, **options)
    run = decoder.start([PROMPT], **OPTIONS | {"grammar": None, "max_new_tokens": 8})
    assert len(run.finish().token_ids) > len(TOKENIZER.encode(PROMPT))


def test_captured_steps_go_on_when_the_grammar_has_left() -> None:
    decoder = _decoder(tiny_drafter(TargetAdapter(MODEL)), captured=True)
    options = OPTIONS | {"grammar": None}
    run = decoder.start([PROMPT], **options)
    decoder.admit(run, [PROMPT], **OPTIONS)
    run.finish()
    assert run.captured is not None
    assert run.captured.num_recorded > 0
    free, constrained = (state.new_token_ids for state in run.sequences)
    assert free == _decoder().generate(PROMPT, **options).new_token_ids
    assert constrained == _decoder().generate(PROMPT, **OPTIONS).new_token_ids
