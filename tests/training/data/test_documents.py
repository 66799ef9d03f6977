"""Records are encoded as tokens, with a mask of exactly the tokens that the drafter learns."""

from typing import Any

import numpy as np
import pytest
from helpers.tokenizers import SlowTokenizer, tiny_tokenizer
from helpers.training import CHAT_TEMPLATE, TEXTS
from transformers import PreTrainedTokenizerBase

from jakiro.errors import DataError
from training.data.documents import Document, encode_documents
from training.data.sources import Intake, Record

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "It is 2."},
    {"role": "user", "content": "And 2 + 2?"},
    {"role": "assistant", "content": "That is 4."},
]


def encode(
    tokenizer: PreTrainedTokenizerBase, *values: dict[str, Any], **options: Any
) -> list[Document]:
    records = [Record(fields, f"file:{number}") for number, fields in enumerate(values, start=1)]
    return list(encode_documents(tokenizer, records, **options))


def responses(tokenizer: PreTrainedTokenizerBase, document: Document) -> list[str]:
    """Return the text of each run of response tokens."""
    borders = np.flatnonzero(np.diff(document.is_response, prepend=False, append=False))
    return [
        tokenizer.decode(document.token_ids[begin:end].tolist())
        for begin, end in borders.reshape(-1, 2)
    ]


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"loss": 0.0}])
def test_turns_that_say_so_are_not_learned(mark: dict[str, Any]) -> None:
    tokenizer = tiny_tokenizer(CHAT_TEMPLATE)
    chat = [*CHAT[:2], CHAT[2] | mark, *CHAT[3:]]
    intake = Intake()
    (document,) = encode(tokenizer, {"messages": chat}, intake=intake)
    assert responses(tokenizer, document) == ["That is 4.</s>"]
    assert intake.num_unlearned == 1
    (usual,) = encode(tokenizer, {"messages": [*CHAT[:2], CHAT[2] | {"weight": 1}]})
    assert responses(tokenizer, usual) == ["It is 2.</s>"]


def test_conversations_need_a_tokenizer_that_reports_offsets() -> None:
    tokenizer = SlowTokenizer(CHAT_TEMPLATE)
    with pytest.raises(DataError, match="need a fast tokenizer"):
        encode(tokenizer, {"messages": CHAT})
    assert len(encode(tokenizer, {"text": TEXTS[0]})) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "?", "text": None}, "file:1 is neither a text nor a conversation"),
        ({"text": "a", "messages": CHAT}, "file:1 has several forms.* got: text, messages"),
        ({"text": 3}, 'file:1 has no text under the key "text"'),
        ({"text": "half \ud800 a character"}, "file:1 contains an invalid character"),
        ({"messages": CHAT[2:3]}, "file:1 has no assistant turn after its first turn"),
        ({"messages": [*CHAT[:2], {"role": "assistant"}]}, "file:1 has a malformed turn"),
        ({"messages": [CHAT[1] | {"content": [{"type": "image"}]}]}, "file:1 has a malformed turn"),
        ({"messages": CHAT, "tools": "no JSON"}, "file:1 has malformed tools"),
        ({"input_ids": [1, 2]}, "no list of integers under loss_mask"),
        ({"input_ids": [[1], [2, 3]], "loss_mask": [0, 1]}, "no list of integers under input_ids"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "file:1 has a loss_mask that does not match"),
        ({"input_ids": [1, -2], "loss_mask": [0, 1]}, "file:1 has token ids from -2"),
        ({"input_ids": [1, 2], "loss_mask": [0, 0]}, "file:1 has no response"),
        ({"input_ids": [1, 2], "loss_mask": [1, 1]}, "file:1 has no prompt"),
    ],
)
def test_an_unusable_record_is_named(fields: dict[str, Any], message: str) -> None:
    good = {"messages": CHAT}
    with pytest.raises(DataError, match=message):
        encode(tiny_tokenizer(CHAT_TEMPLATE), fields)
    intake = Intake(is_skipping=True)
    (document,) = encode(tiny_tokenizer(CHAT_TEMPLATE), fields, good, intake=intake)
    assert intake.num_skipped == 1
    assert document.is_response.any()


def test_tokens_and_their_mask_are_taken_as_they_are() -> None:
    fields = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 0], "attention_mask": [1] * 4}
    for mask in (fields["loss_mask"], [False, True, True, False]):
        (document,) = encode(tiny_tokenizer(), fields | {"loss_mask": mask})
        assert document.token_ids.tolist() == [5, 6, 7, 8]
        assert document.is_response.tolist() == [False, True, True, False]


@pytest.mark.parametrize(
    "fields", [{"input_ids": [5, 299, 7], "loss_mask": [0, 1, 1]}, {"text": "any text"}]
)
def test_a_token_that_the_target_does_not_have_is_named(fields: dict[str, Any]) -> None:
    tokenizer = tiny_tokenizer()
    highest = max(encode(tokenizer, fields, vocab_size=300)[0].token_ids)
    with pytest.raises(DataError, match=rf"file:1 has a token .* got: {highest};"):
        encode(tokenizer, fields, vocab_size=int(highest))


def test_all_forms_of_conversations_are_read_alike_and_in_order() -> None:
    tokenizer = tiny_tokenizer(CHAT_TEMPLATE)
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    shared = [{"from": names[turn["role"]], "value": turn["content"]} for turn in CHAT]
    parts = [turn | {"content": [{"type": "text", "text": turn["content"]}]} for turn in CHAT]
    records = [
        {"messages": CHAT},
        {"text": TEXTS[0]},
        {"conversations": shared},
        {"messages": parts},
    ]
    expected, text, *others = encode(tokenizer, *records)
    assert tokenizer.decode(text.token_ids[:-1].tolist()) == TEXTS[0]
    for document in others:
        np.testing.assert_array_equal(document.token_ids, expected.token_ids)
        np.testing.assert_array_equal(document.is_response, expected.is_response)
