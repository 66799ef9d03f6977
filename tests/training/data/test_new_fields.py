"""Regenerated records: questions contain the new answers so far, and other turns are kept."""

from collections.abc import Generator
from typing import Any

import pytest
from helpers.tokenizers import tiny_tokenizer
from helpers.training import CHAT_TEMPLATE

from training.data.regeneration import Answer, new_fields
from training.data.sources import Record

TOKENIZER = tiny_tokenizer(CHAT_TEMPLATE)
CHAT = [
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "Who knows?"},
    {"role": "user", "content": "Please."},
    {"role": "assistant", "content": "No."},
]


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


def test_a_question_includes_the_new_answers_before_it() -> None:
    questions, record = _regenerated({"messages": CHAT}, _answer("Two."), _answer("2"))
    assert [message["content"] for message in record["messages"]] == [
        *("What is 1 + 1?", "Two."),
        *("Please.", "2"),
    ]
    assert [TOKENIZER.decode(question) for question in questions] == [
        "<user>What is 1 + 1?</s><assistant>",
        "<user>What is 1 + 1?</s><assistant>Two.</s><user>Please.</s><assistant>",
    ]


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
