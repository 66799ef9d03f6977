"""Regeneration replaces the answers in the data with the target's, also after interruptions."""

import json
from collections.abc import Generator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama
from helpers.tokenizers import tiny_tokenizer
from helpers.training import CHAT_TEMPLATE, TEXTS, write_jsonl
from transformers import LlamaForCausalLM

from inference import SpeculativeDecoder
from jakiro.errors import ConfigError, DataError
from jakiro.target.adapter import TargetAdapter
from training.data.generation import OutputFile, RegenerationSettings
from training.data.regeneration import (
    Answer,
    RegenerationCounts,
    Regenerator,
    new_fields,
)
from training.data.sources import Record, find_sources

TOKENIZER = tiny_tokenizer(CHAT_TEMPLATE)
CHATS = [
    [
        {"role": "user", "content": f"What is {number} + 1?"},
        {"role": "assistant", "content": "Who knows?"},
        {"role": "user", "content": "Please."},
        {"role": "assistant", "content": "No."},
    ]
    for number in range(3)
]
RECORDS = [
    {"messages": CHATS[0]},
    {"text": TEXTS[0][:40]},
    {"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "!"}]},
    {"messages": CHATS[1]},
    {"input_ids": [40, 41, 42, 43], "loss_mask": [0, 0, 1, 1]},
    {"messages": CHATS[2][:2]},
]


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny_llama(vocab=300, eos_token_id=0, max_position_embeddings=256)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "data.jsonl", RECORDS)


def regenerator(
    target: LlamaForCausalLM, is_drafting: bool = False, **settings: Any
) -> Regenerator:
    drafter = tiny_drafter(TargetAdapter(target)) if is_drafting else None
    values = {"max_new_tokens": 6, "prompt_tokens": 8, "batch_size": 4} | settings
    decoder = SpeculativeDecoder(target, drafter, TOKENIZER, tree="fixed")
    return Regenerator(decoder, RegenerationSettings(**values))


def write(regenerator: Regenerator, data: Path, out: Path) -> RegenerationCounts:
    return regenerator.write(find_sources([str(data)]), OutputFile(out))


def records_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_answer_is_what_the_target_generates_after_the_answers_before(
    target: LlamaForCausalLM, data: Path, tmp_path: Path
) -> None:
    written = write(regenerator(target), data, tmp_path / "out.jsonl")
    records = records_of(tmp_path / "out.jsonl")
    assert [record["record"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert (written.records, written.answers) == (6, 8)
    for record in (record for record in records if "messages" in record):
        for index in range(1, len(record["messages"]), 2):
            inputs = TOKENIZER.apply_chat_template(
                record["messages"][:index], add_generation_prompt=True, return_tensors="pt"
            )
            output = target.generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=0)
            new = output[0, inputs["input_ids"].shape[1] :]
            expected = TOKENIZER.decode(new, skip_special_tokens=True)
            if "is_cut" in record["messages"][index]:
                expected = expected.rstrip("\ufffd")
            assert record["messages"][index]["role"] == "assistant"
            assert record["messages"][index]["content"] == expected


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 3}], ids=str)
def test_neither_the_batch_size_nor_interruptions_change_a_record(
    target: LlamaForCausalLM,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
) -> None:
    write(regenerator(target, True, **settings), data, tmp_path / "whole.jsonl")
    parted = tmp_path / "parted.jsonl"
    small_batches = regenerator(target, True, **settings, batch_size=2)
    with monkeypatch.context() as patched:
        patched.setattr(OutputFile, "append", _interrupted_after(2))
        with pytest.raises(KeyboardInterrupt):
            write(small_batches, data, parted)
    assert len(records_of(parted)) == 2
    parted.write_bytes(parted.read_bytes() + b'{"record": 3, "mess')  # cut off by a crash
    written = write(small_batches, data, parted)
    assert written.records == 4
    assert parted.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert write(small_batches, data, parted) == RegenerationCounts()


def _interrupted_after(count: int) -> Any:
    original, calls = OutputFile.append, iter(range(count))

    def append(*arguments: Any) -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        original(*arguments)

    return append


def test_records_keep_the_fields_that_have_nothing_to_do_with_their_answers(
    target: LlamaForCausalLM, tmp_path: Path
) -> None:
    own = {"id": "a7", "category": {"name": "x"}, "record": 12, "is_cut": True}
    rows = [RECORDS[0] | own, RECORDS[1] | own, RECORDS[4] | own]
    write(regenerator(target), write_jsonl(tmp_path / "d.jsonl", rows), tmp_path / "o.jsonl")
    for row, record in enumerate(records_of(tmp_path / "o.jsonl"), start=1):
        assert (record["id"], record["category"], record["record"]) == ("a7", {"name": "x"}, row)


def test_greedy_records_do_not_depend_on_a_drafter_or_the_seed(
    target: LlamaForCausalLM, data: Path, tmp_path: Path
) -> None:
    write(regenerator(target), data, tmp_path / "autoregressive.jsonl")
    written = write(regenerator(target, True, seed=9), data, tmp_path / "drafted.jsonl")
    assert written.tau >= 1
    names = ("autoregressive.jsonl", "drafted.jsonl")
    texts = [(tmp_path / name).read_bytes() for name in names]
    assert texts[0] == texts[1]


def test_sampled_records_of_one_drafter_are_not_continued_with_another(
    target: LlamaForCausalLM, data: Path, tmp_path: Path
) -> None:
    write(regenerator(target, temperature=1.0), data, tmp_path / "out.jsonl")
    with pytest.raises(ConfigError, match=r"other settings \(drafter differs\)"):
        write(regenerator(target, True, temperature=1.0), data, tmp_path / "out.jsonl")


def test_a_file_made_with_other_settings_or_another_target_or_data_is_refused(
    target: LlamaForCausalLM, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    write(regenerator(target), data, out)
    before = out.read_bytes()
    other = deepcopy(target)
    with torch.no_grad():
        other.model.norm.weight[3] += 1e-3  # the fingerprints that drafters contain ignore norms
    less = write_jsonl(tmp_path / "less.jsonl", RECORDS[:3])
    for changed, records, name in (
        (regenerator(target, max_new_tokens=7), data, "max_new_tokens"),
        (regenerator(target, temperature=0.5), data, "temperature"),
        (regenerator(other), data, "target_weights"),
        (regenerator(deepcopy(target).to(torch.bfloat16)), data, "target_dtype"),
        (regenerator(target), less, "data"),
    ):
        with pytest.raises(ConfigError, match=rf"other settings \({name} differs\)"):
            write(changed, records, out)
    assert out.read_bytes() == before
    out.with_name("out.jsonl.settings").unlink()
    with pytest.raises(ConfigError, match="was not written by this command"):
        write(regenerator(target), data, out)


def test_a_file_has_one_writer(target: LlamaForCausalLM, data: Path, tmp_path: Path) -> None:
    writer, out = regenerator(target), tmp_path / "out.jsonl"
    write(writer, data, out)
    lock = (tmp_path / ".out.jsonl.lock").stat().st_ino
    facts = json.loads(out.with_name("out.jsonl.settings").read_text())
    with OutputFile(out).claim(facts), pytest.raises(ConfigError, match="another process"):
        write(writer, data, out)
    assert (tmp_path / ".out.jsonl.lock").stat().st_ino == lock  # all processes lock one file


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": "a"}, "data.jsonl:2 contains no text to be continued"),
        ({"input_ids": [300, 2], "loss_mask": [0, 1]}, "data.jsonl:2 has a token that the target"),
        ({"messages": [CHATS[0][0] | {"content": "x " * 300}, CHATS[0][1]]}, "does not fit into"),
    ],
)
def test_an_unusable_record_is_named_or_skipped_and_counted(
    target: LlamaForCausalLM, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", [RECORDS[0], fields, RECORDS[5]])
    with pytest.raises(DataError, match=message):
        write(regenerator(target), data, tmp_path / "out.jsonl")
    out = tmp_path / "skipping.jsonl"
    assert write(regenerator(target, skip_bad_records=True), data, out).left_out == 1
    assert [record["record"] for record in records_of(out)] == [1, 3]


CHAT = CHATS[1]


def ask(question: list[int]) -> Generator[list[int], Answer, Answer]:
    """Yield a question, and return its answer."""
    return (yield question)


def _answer(text: str, is_cut: bool = False) -> Answer:
    return Answer(TOKENIZER(text)["input_ids"], text, is_cut)


def _regenerated(
    fields: dict[str, Any], *answers: Answer, tokenizer: Any = TOKENIZER, prompt_tokens: int = 8
) -> tuple[list[list[int]], dict[str, Any]]:
    """Return the questions of a record's dialogue, and the new record with the given answers."""
    dialogue = new_fields(Record(fields, "data.jsonl:1"), tokenizer, prompt_tokens, ask)
    questions = [next(dialogue)]
    for answer in answers[:-1]:
        questions.append(dialogue.send(answer))
    with pytest.raises(StopIteration) as end:
        dialogue.send(answers[-1])
    return questions, end.value.value


@pytest.mark.parametrize(("prompt_tokens", "kept"), [(3, 3), (100, 6)])
def test_a_text_keeps_its_first_tokens_but_at_most_half_of_them(
    prompt_tokens: int, kept: int
) -> None:
    ids = list(range(40, 52))
    text = TOKENIZER.decode(ids)
    assert TOKENIZER(text)["input_ids"] == ids
    (start,), record = _regenerated({"text": text}, _answer(" end"), prompt_tokens=prompt_tokens)
    assert start == ids[:kept]
    assert record == {"text": TOKENIZER.decode(start) + " end"}


def test_token_ids_before_the_first_response_are_kept() -> None:
    fields = {"input_ids": [40, 41, 42, 43, 44], "loss_mask": [0, 0, 1, 0, 1]}
    (prompt,), record = _regenerated(fields, Answer([7, 8, 9], "...", is_cut=True))
    assert prompt == [40, 41]
    assert record == {"input_ids": [40, 41, 7, 8, 9], "loss_mask": [0, 0, 1, 1, 1]}


def test_only_answers_and_texts_that_were_cut_off_are_marked() -> None:
    _, chat = _regenerated({"messages": CHAT}, _answer("Two", is_cut=True), _answer("2"))
    assert ["is_cut" in message for message in chat["messages"]] == [False, True, False, False]
    for is_cut in (False, True):
        _, text = _regenerated({"text": "def main(argument):"}, _answer(" pass", is_cut))
        assert text.get("is_cut", False) is is_cut


def test_tool_calls_stay_because_their_results_follow() -> None:
    template = CHAT_TEMPLATE.replace("m.content", "(m.content or m.tool_calls[0].name)")
    call = {"role": "assistant", "tool_calls": [{"name": "add"}]}
    chat = [CHAT[0], call, {"role": "tool", "content": "2"}, CHAT[1]]
    fields = {"messages": chat, "tools": [{"name": "add"}]}
    tokenizer = tiny_tokenizer(template)
    (question,), got = _regenerated(fields, _answer("Two."), tokenizer=tokenizer)
    assert tokenizer.decode(question).endswith("<assistant>add</s><tool>2</s><assistant>")
    assert got["messages"][:3] == chat[:3]
    assert got["messages"][3]["content"] == "Two."
    assert got["tools"] == fields["tools"]


@pytest.mark.parametrize("fields", [{"messages": CHAT[:1]}, {"text": "ab"}])
def test_an_answer_that_is_cut_ends_with_a_whole_character(fields: dict[str, Any]) -> None:
    ids = TOKENIZER("naïve 漢")["input_ids"][:-1]
    text = TOKENIZER.decode(ids)
    assert text.endswith("\ufffd")
    _, record = _regenerated(fields, Answer(ids, text, is_cut=True))
    written = record["messages"][-1]["content"] if "messages" in record else record["text"]
    assert written.endswith("naïve ")
