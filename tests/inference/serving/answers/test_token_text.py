"""The bytes of tokens join to the text of an answer, whatever the tokens are."""

from itertools import chain

import pytest
from helpers.tokenizers import spaced_tokenizer, tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from inference.serving.answers.token_text import bytes_of_token

TOKENIZER = tiny_tokenizer()


def _joined(token_ids: list[int]) -> bytes:
    return bytes(chain.from_iterable(bytes_of_token(TOKENIZER, own) or [] for own in token_ids))


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=30))
def test_bytes_join_to_the_text(token_ids: list[int]) -> None:
    text = TOKENIZER.decode(token_ids, skip_special_tokens=True)
    assert _joined(token_ids).decode(errors="replace") == text


@pytest.mark.parametrize("text", ["漢字😀", "👩‍👩‍👧", "\N{REPLACEMENT CHARACTER}!", "a\n\t\x00ü"])
def test_bytes_of_parts_of_characters_are_known(text: str) -> None:
    token_ids = TOKENIZER(text)["input_ids"]
    assert all(bytes_of_token(TOKENIZER, own) for own in token_ids)
    assert _joined(token_ids) == text.encode()


def test_tokens_that_are_named_by_their_byte() -> None:
    tokenizer = spaced_tokenizer()
    names = ["<0xC3>", "<0xBC>", "b", "</s>"]
    token_ids = [int(tokenizer.convert_tokens_to_ids(name)) for name in names]
    assert [bytes_of_token(tokenizer, own) for own in token_ids] == [(0xC3,), (0xBC,), (98,), None]
