"""Rows become tokens, and the mask covers exactly what the drafter shall learn to guess."""

from typing import Any

import numpy as np
import pytest
from helpers.tokenizers import tiny_tokenizer
from helpers.training import CHAT_TEMPLATE, TEXTS
from transformers import PreTrainedTokenizerFast

from jakiro.errors import DataError
from training.data.documents import Document, encode_documents
from training.data.sources import Record

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "It is 2."},
    {"role": "user", "content": "And 2 + 2?"},
    {"role": "assistant", "content": "That is 4."},
]


def encode(tokenizer: PreTrainedTokenizerFast, *rows: dict[str, Any]) -> list[Document]:
    records = [Record(row, f"file:{number}") for number, row in enumerate(rows, start=1)]
    return list(encode_documents(tokenizer, records))


def responses(tokenizer: PreTrainedTokenizerFast, document: Document) -> list[str]:
    """The texts of the runs of response tokens."""
    borders = np.flatnonzero(np.diff(document.is_response, prepend=False, append=False))
    return [
        tokenizer.decode(document.token_ids[begin:end].tolist())
        for begin, end in borders.reshape(-1, 2)
    ]


def test_a_text_is_all_response_and_ends_with_the_end_of_sequence() -> None:
    tokenizer = tiny_tokenizer()
    (document,) = encode(tokenizer, {"text": TEXTS[0]})
    assert document.is_response.all()
    assert document.token_ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(document.token_ids[:-1].tolist()) == TEXTS[0]


def test_only_the_turns_of_the_assistant_with_their_ends_are_responses() -> None:
    tokenizer = tiny_tokenizer(CHAT_TEMPLATE)
    (document,) = encode(tokenizer, {"messages": CHAT})
    assert responses(tokenizer, document) == ["It is 2.</s>", "That is 4.</s>"]
    expected = tokenizer.apply_chat_template(CHAT, return_dict=False)
    assert document.token_ids.tolist() == expected


def test_sharegpt_rows_are_read_like_messages() -> None:
    tokenizer = tiny_tokenizer(CHAT_TEMPLATE)
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    shared = [{"from": names[turn["role"]], "value": turn["content"]} for turn in CHAT]
    plain, sharegpt = encode(tokenizer, {"messages": CHAT}, {"conversations": shared})
    for one, other in zip(plain, sharegpt, strict=True):
        np.testing.assert_array_equal(one, other)


def test_texts_and_conversations_keep_their_order() -> None:
    tokenizer = tiny_tokenizer(CHAT_TEMPLATE)
    rows = [{"text": TEXTS[0]}, {"messages": CHAT}, {"text": TEXTS[1]}]
    together = encode(tokenizer, *rows)
    for document, row in zip(together, rows, strict=True):
        np.testing.assert_array_equal(document.token_ids, encode(tokenizer, row)[0].token_ids)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "?"}, "file:1 is neither a text nor a conversation; .* got: prompt"),
        ({"messages": "hi"}, "file:1 holds no conversation"),
        ({"messages": CHAT[:2]}, "file:1 has no assistant turn"),
        ({"messages": []}, "file:1 has no assistant turn.* got: no turns"),
        ({"messages": [{"role": "assistant", "content": 3}]}, "file:1 has a malformed turn"),
    ],
)
def test_a_row_that_teaches_nothing_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        encode(tiny_tokenizer(CHAT_TEMPLATE), row)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "refuses file:1; got: roles must"),
        ("{{ messages[-1].content }}", "rewrites earlier turns of file:1"),
        ("x{% if messages|length > 1 %}{% endif %}", "the same everywhere; .* got: no response"),
        ("{% for m in messages[2:3] %}{{ m.content }}{% endfor %}", "got: nothing but response"),
    ],
)
def test_an_unsuitable_template_is_explained(template: str | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        encode(tiny_tokenizer(template), {"messages": CHAT[:3]})
