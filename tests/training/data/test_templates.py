"""Response masks cover the tokens that the target would generate, with every kind of template."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from helpers.templates import FAMILIES, family_tokenizer
from helpers.tokenizers import tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from training.data.documents import Document, encode_documents
from training.data.sources import Record

SYSTEM = {"role": "system", "content": "Be brief."}
CHAT = [
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "It is 2."},
    {"role": "user", "content": "And 2 + 2?"},
    {"role": "assistant", "content": "That is 4."},
]
THOUGHT = "<think>\nAdd them.\n</think>\n\nIt is 2."


def encode(tokenizer: PreTrainedTokenizerFast, *values: dict[str, Any]) -> list[Document]:
    records = [Record(fields, f"file:{number}") for number, fields in enumerate(values, start=1)]
    return list(encode_documents(tokenizer, records))


def parts(tokenizer: PreTrainedTokenizerFast, document: Document) -> list[tuple[bool, str]]:
    """Return whether each run of equally masked tokens is a response, and the text of the run."""
    borders = [0, *np.flatnonzero(np.diff(document.is_response)) + 1, len(document.token_ids)]
    return [
        (bool(document.is_response[begin]), tokenizer.decode(document.token_ids[begin:end]))
        for begin, end in pairwise(borders)
    ]


def responses(tokenizer: PreTrainedTokenizerFast, document: Document) -> list[str]:
    return [text for is_response, text in parts(tokenizer, document) if is_response]


@pytest.mark.parametrize(
    ("name", "cut"), [("chatml", 1), ("llama-3", 3), ("gemma", 1), ("mistral", 3), ("r1", 1)]
)
def test_the_missing_end_of_an_answer_that_was_cut_is_not_learnt(name: str, cut: int) -> None:
    tokenizer = family_tokenizer(name)
    chat = [turn | {"is_cut": True} if n == cut else turn for n, turn in enumerate(CHAT)]
    whole, marked = (encode(tokenizer, {"messages": messages}) for messages in (CHAT, chat))
    for before, after in zip(whole, marked, strict=True):
        np.testing.assert_array_equal(before.token_ids, after.token_ids)
    before, after = (
        [text for document in documents for text in responses(tokenizer, document)]
        for documents in (whole, marked)
    )
    changed, kept = (0, 1) if cut == 1 else (1, 0)
    assert after[kept] == before[kept]
    assert after[changed].endswith(CHAT[cut]["content"])
    assert before[changed].startswith(after[changed])
    assert len(before[changed]) > len(after[changed])


@pytest.mark.parametrize(
    ("name", "messages", "expected"),
    [
        ("chatml", [SYSTEM, *CHAT], ["It is 2.<|im_end|>\n", "That is 4.<|im_end|>\n"]),
        ("llama-3", [SYSTEM, *CHAT], ["It is 2.<|eot_id|>", "That is 4.<|eot_id|>"]),
        ("gemma", CHAT, ["It is 2.<end_of_turn>\n", "That is 4.<end_of_turn>\n"]),
        ("mistral", CHAT, [" It is 2.</s>", " That is 4.</s>"]),
    ],
)
def test_a_template_that_only_appends_gives_one_document_with_all_answers(
    name: str, messages: list[dict[str, str]], expected: list[str]
) -> None:
    tokenizer = family_tokenizer(name)
    (document,) = encode(tokenizer, {"messages": messages})
    assert responses(tokenizer, document) == expected
    whole = tokenizer.apply_chat_template(messages, return_dict=False)
    assert document.token_ids.tolist() == whole


@pytest.mark.parametrize("name", FAMILIES)
def test_the_text_before_the_last_answer_is_the_text_that_decoding_reads(name: str) -> None:
    tokenizer = family_tokenizer(name)
    messages = CHAT if name == "gemma" else [SYSTEM, *CHAT]
    for chat in (messages[:-2], messages):
        document = encode(tokenizer, {"messages": chat})[-1]
        last = int(np.flatnonzero(np.diff(document.is_response.astype(int)) == 1)[-1]) + 1
        asked = tokenizer.apply_chat_template(
            chat[:-1], add_generation_prompt=True, return_dict=False
        )
        assert document.token_ids[:last].tolist() == asked


def test_reasoning_is_part_of_the_response_and_earlier_reasoning_is_dropped() -> None:
    tokenizer = family_tokenizer("qwen3")
    first, second = encode(
        tokenizer, {"messages": [CHAT[0], {"role": "assistant", "content": THOUGHT}, *CHAT[2:]]}
    )
    assert responses(tokenizer, first) == [f"{THOUGHT}<|im_end|>\n"]
    assert responses(tokenizer, second) == ["<think>\n\n</think>\n\nThat is 4.<|im_end|>\n"]
    assert "Add them." not in parts(tokenizer, second)[0][1]
    assert "It is 2.<|im_end|>" in parts(tokenizer, second)[0][1]


@pytest.mark.parametrize("name", ["mistral", "mistral-last"])
def test_a_system_turn_that_moves_is_in_the_last_question_before_each_answer(name: str) -> None:
    tokenizer = family_tokenizer(name)
    first, second = encode(tokenizer, {"messages": [SYSTEM, *CHAT]})
    assert parts(tokenizer, first) == [
        (False, "<s>[INST] Be brief.\n\nWhat is 1 + 1?[/INST]"),
        (True, " It is 2.</s>"),
    ]
    assert parts(tokenizer, second) == [
        (
            False,
            "<s>[INST] What is 1 + 1?[/INST] It is 2.</s>[INST] Be brief.\n\nAnd 2 + 2?[/INST]",
        ),
        (True, " That is 4.</s>"),
    ]


@pytest.mark.parametrize("said", ["<think>\nAdd the", "It is"])
def test_a_cut_answer_is_read_as_written_where_the_template_adds_to_it(said: str) -> None:
    tokenizer = family_tokenizer("qwen3")
    messages = [CHAT[0], {"role": "assistant", "content": said, "is_cut": True}, *CHAT[2:]]
    first, second = encode(tokenizer, {"messages": messages})
    assert parts(tokenizer, first) == [
        (False, "<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n"),
        (True, said),
    ]
    (whole,) = encode(tokenizer, {"messages": CHAT})[1:]
    assert responses(tokenizer, second) == responses(tokenizer, whole)


def test_reasoning_that_the_template_leaves_out_is_read_as_written() -> None:
    tokenizer = family_tokenizer("r1")
    said = "Add them.\n</think>\n\nIt is 2."
    messages = [CHAT[0], {"role": "assistant", "content": said}, *CHAT[2:]]
    first, second = encode(tokenizer, {"messages": messages})
    assert parts(tokenizer, first) == [
        (False, "<bos><|User|>What is 1 + 1?<|Assistant|><think>\n"),
        (True, f"{said}</s>"),
    ]
    assert "Add them." not in tokenizer.decode(second.token_ids)
    messages[1] |= {"is_cut": True}
    (cut, _) = encode(tokenizer, {"messages": messages})
    assert responses(tokenizer, cut) == [said]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"content": THOUGHT}, "Add them.\n</think>\n\nIt is 2.</s>"),
        ({"content": "It is 2.", "reasoning_content": "Add them."}, None),
        ({"content": "<think>\nAdd the", "is_cut": True}, "Add the"),
    ],
)
def test_a_tag_that_the_generation_prompt_opens_is_written_once(
    fields: dict[str, Any], said: str | None
) -> None:
    said = said or "Add them.\n</think>\n\nIt is 2.</s>"
    tokenizer = family_tokenizer("r1")
    answer = {"role": "assistant", **fields}
    (document,) = encode(tokenizer, {"messages": [CHAT[0], answer]})
    assert parts(tokenizer, document)[:2] == [
        (False, "<bos><|User|>What is 1 + 1?<|Assistant|><think>\n"),
        (True, said),
    ]


def test_a_template_gets_tools_and_calls() -> None:
    template = (
        "{{ tools | map(attribute='name') | join }}{% for m in messages %}<{{ m.role }}>"
        "{{ m.content or m.tool_calls[0].name }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    tool = {"role": "tool", "content": "2", "name": "add"}
    tokenizer = tiny_tokenizer(template)
    for tools in ([{"name": "add"}], '[{"name": "add"}]'):
        (document,) = encode(
            tokenizer, {"messages": [CHAT[0], call, tool, CHAT[1]], "tools": tools}
        )
        assert responses(tokenizer, document) == ["add</s>", "It is 2.</s>"]
        assert parts(tokenizer, document)[0][1].startswith("add<user>")


def test_a_template_that_reads_the_clock_writes_the_same_text_every_day() -> None:
    template = "{{ strftime_now('%d %b %Y') }}" + FAMILIES["chatml"].template
    (document,) = encode(tiny_tokenizer(template), {"messages": CHAT})
    assert parts(tiny_tokenizer(), document)[0][1].startswith("26 Jul 2024<|im_start|>user")


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ('{"a": 1}', "{arguments} | tojson"),
        ({"a": 1}, "{arguments} | tojson"),
        ('{"a": 1}', "('' + {arguments})"),  # a few templates expect the arguments as JSON
    ],
)
def test_arguments_of_calls_reach_the_template_as_objects_or_as_json(
    given: Any, written: str
) -> None:
    arguments = written.format(arguments="m.tool_calls[0].function.arguments")
    tokenizer = tiny_tokenizer(
        "{% for m in messages %}{{ m.content or " + arguments + " }}</s>{% endfor %}"
    )
    call = {"function": {"name": "add", "arguments": given}}
    messages = [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    (document,) = encode(tokenizer, {"messages": messages})
    assert responses(tokenizer, document) == ['{"a": 1}</s>']
