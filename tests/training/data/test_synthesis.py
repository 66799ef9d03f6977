"""Synthesized data: its form, its filters, and its independence of batches and interruptions."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import tiny_llama
from helpers.templates import CHATML, family_tokenizer
from helpers.tokenizers import tiny_tokenizer
from transformers import LlamaForCausalLM

from inference import SpeculativeDecoder
from jakiro.errors import DataError
from training.data.dialogues import Dialogue
from training.data.documents import encode_documents
from training.data.generation import OutputFile, SynthesisSettings
from training.data.rendering import Chat, render_user_opening
from training.data.sources import find_sources
from training.data.synthesis import (
    Candidate,
    InLoop,
    SynthesisCounts,
    Synthesizer,
    ends_in_loop,
)

TOKENIZER = tiny_tokenizer(CHATML)
SMALL = {"conversations": 6, "max_question_tokens": 24, "max_new_tokens": 12, "seed": 3}


def _write(
    target: LlamaForCausalLM,
    path: Path,
    tokenizer: Any = TOKENIZER,
    kind_of_writer: type[Synthesizer] = Synthesizer,
    **changes: Any,
) -> tuple[list[dict[str, Any]], SynthesisCounts]:
    settings = SynthesisSettings(**{**SMALL, **changes})
    decoder = SpeculativeDecoder(target, tokenizer=tokenizer)
    counts = kind_of_writer(decoder, settings).write(OutputFile(path))
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


class Choosy(Synthesizer):
    """Drops two of three answers that are greedy."""

    def _answer(self, candidate: Candidate, turn: int) -> Dialogue[dict[str, Any] | None]:
        answer = yield from super()._answer(candidate, turn)
        return None if candidate.is_greedy and candidate.number % 3 else answer


def test_records_depend_neither_on_batches_nor_on_interruptions(
    target: LlamaForCausalLM, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"kind_of_writer": Choosy, "multi_turn": 0.5}
    whole, counts = _write(target, tmp_path / "whole.jsonl", conversations=8, **changes)
    assert sum(counts.dropped.values()) > 0
    greedy = sum(record["messages"][1]["greedy"] for record in whole)
    assert 0 < greedy < 8
    path = tmp_path / "parts.jsonl"
    for conversations, size in ((1, 1), (6, 5), (8, 3)):
        parts: dict[str, Any] = {"conversations": conversations, "batch_size": size}
        records, counts = _write(target, path, **parts, **changes)
        assert records == whole[:conversations]
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert counts.records == 2


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


def test_a_text_ends_as_soon_as_it_loops() -> None:
    loop = torch.tensor([9, 9, 1, *[2, 3, 4, 5, 6, 7, 8, 1] * 4])
    lengths = range(1, len(loop) + 1)
    assert [length for length in lengths if ends_in_loop(loop[:length])] == [34, 35]


def test_loops_are_not_written_to_their_full_length() -> None:
    looping = tiny_llama(vocab=300)
    looping.generation_config.eos_token_id = None
    torch.nn.init.zeros_(looping.lm_head.weight)  # greedy decoding repeats token 0
    output = SpeculativeDecoder(looping).generate(
        [5, 6], temperature=0, max_new_tokens=100, stopping_criteria=[InLoop()]
    )
    assert output.new_token_ids == [0] * 11  # these contain the same 8-gram four times
