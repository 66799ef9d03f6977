"""Synthesized data: its form, its filters, and its independence of batches and interruptions."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.models import tiny_llama
from helpers.templates import CHATML, family_tokenizer
from helpers.tokenizers import tiny_tokenizer
from transformers import LlamaForCausalLM

from inference import SpeculativeDecoder
from inference.drafters.lookup import LookupDrafter
from jakiro.errors import DataError
from training.data.chat import Chat
from training.data.documents import encode_documents
from training.data.generation_settings import SynthesisSettings
from training.data.output_file import OutputFile
from training.data.rendering import render_user_opening
from training.data.sources import find_sources
from training.data.synthesis import SynthesisCounts, Synthesizer

TOKENIZER = tiny_tokenizer(CHATML)
SMALL = {"conversations": 6, "max_question_tokens": 24, "max_new_tokens": 12, "seed": 3}


def _write(
    target: LlamaForCausalLM, path: Path, tokenizer: Any = TOKENIZER, **changes: Any
) -> tuple[list[dict[str, Any]], SynthesisCounts]:
    settings = SynthesisSettings(**{**SMALL, **changes})
    decoder = SpeculativeDecoder(target, tokenizer=tokenizer)
    counts = Synthesizer(decoder, settings).write(OutputFile(path))
    return [json.loads(line) for line in path.read_text().splitlines()], counts


def test_conversations_alternate_and_are_data_that_training_reads(
    target: LlamaForCausalLM, tmp_path: Path
) -> None:
    path = tmp_path / "own.jsonl"
    records, counts = _write(target, path, multi_turn=0.5, max_turns=3, seed=2)
    assert len(records) == counts.records == 6
    assert counts.tokens > 0
    for record in records:
        roles = [turn["role"] for turn in record["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert len(roles) <= 6
        assert all(turn["content"] for turn in record["messages"])
    assert {len(record["messages"]) for record in records} > {2}
    beginnings = [tuple(TOKENIZER(r["messages"][0]["content"]).input_ids[:8]) for r in records]
    assert len(set(beginnings)) == 6
    (source,) = find_sources([str(path)])
    documents = list(encode_documents(TOKENIZER, source.records()))
    assert len(documents) == 6


def test_a_drafter_writes_the_same_greedy_answers(target: LlamaForCausalLM, tmp_path: Path) -> None:
    settings = SynthesisSettings(**SMALL, greedy=1.0)
    alone, _ = _write(target, tmp_path / "alone.jsonl", greedy=1.0)
    decoder = SpeculativeDecoder(target, LookupDrafter(), TOKENIZER, tree="fixed")
    output = OutputFile(tmp_path / "drafted.jsonl")
    Synthesizer(decoder, settings).write(output)
    by_question = {r["messages"][0]["content"]: r["messages"][1] for r in alone}
    shared = [r for r in output.records() if r["messages"][0]["content"] in by_question]
    for record in shared:
        question, answer = record["messages"][:2]
        assert by_question[question["content"]] == answer


def test_base_models_write_texts(target: LlamaForCausalLM, tmp_path: Path) -> None:
    records, _ = _write(target, tmp_path / "own.jsonl", tiny_tokenizer(), kind="texts")
    assert len(records) == 6
    assert all(record.keys() <= {"record", "text", "is_cut"} for record in records)
    cut, whole = (
        [r for r in records if r.get("is_cut", False) is is_cut] for is_cut in (True, False)
    )
    assert cut
    assert whole
    (source,) = find_sources([str(tmp_path / "own.jsonl")])
    documents = encode_documents(tiny_tokenizer(), source.records())
    for document, record in zip(documents, records, strict=True):
        assert (document.token_ids[-1] == 0) is not record.get("is_cut", False)


def test_a_target_without_a_chat_template_is_refused_by_name(
    target: LlamaForCausalLM, tmp_path: Path
) -> None:
    target.name_or_path = "some/base-model"
    with pytest.raises(DataError, match=r"some/base-model has no chat template.*--kind texts"):
        _write(target, tmp_path / "own.jsonl", tiny_tokenizer())


def test_a_target_that_never_ends_a_turn_is_given_up_with_the_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.data.synthesis.LONGEST_SILENCE", 20)
    endless = tiny_llama(vocab=300, max_position_embeddings=128)
    with pytest.raises(DataError, match=r"20 attempts in a row produced no usable record.*no end"):
        _write(endless, tmp_path / "own.jsonl", conversations=2)


def test_conversations_that_begin_alike_are_dropped(
    target: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.data.synthesis.LONGEST_SILENCE", 16)
    with pytest.raises(DataError, match=r"got: records dropped .* duplicate"):
        _write(target, tmp_path / "own.jsonl", kind="texts", temperature=0.001)
    assert len((tmp_path / "own.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("name", ["chatml", "llama-3", "gemma", "qwen3"])
def test_the_users_text_begins_after_the_header_of_the_turn(name: str) -> None:
    tokenizer = family_tokenizer(name)
    opening = render_user_opening(tokenizer, Chat([], None, "here"))
    asked = [{"role": "user", "content": "Why is that so?"}]
    text = tokenizer.apply_chat_template(asked, tokenize=False)
    assert text.startswith(opening + "Why is that so?")
    answered = [*asked, {"role": "assistant", "content": "Because."}]
    longer = render_user_opening(tokenizer, Chat(answered, None, "here"))
    assert longer.startswith(opening + "Why is that so?")
    assert longer != opening
