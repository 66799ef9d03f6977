"""Whole characters survive beside bytes that are none, whatever the tokenizer does with bytes."""

from helpers.tokenizers import spaced_tokenizer, tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from inference.generation.incremental_text import IncrementalText
from jakiro.utils.token_text import common_length, text_of_tokens

SPACED = spaced_tokenizer()
PIECES = ["猫".encode(), "é".encode(), b"a", b"\xff", b"\xe7\x8c", b"\xf0\x9f\x98", b"\x80"]


def _tokens(content: bytes) -> list[int]:
    names = [f"<0x{byte:02X}>" for byte in content]
    return list(SPACED.convert_tokens_to_ids(names))


def test_a_cut_character_does_not_cost_those_before_it() -> None:
    ids = _tokens("猫犬鳥".encode())
    texts = [text_of_tokens(SPACED, ids[:count]) for count in (4, 5, 8, 9)]
    assert texts == ["猫\ufffd", "猫\ufffd", "猫犬\ufffd", "猫犬鳥"]


@given(st.lists(st.sampled_from(PIECES)))
def test_the_text_and_its_stream_are_those_of_the_bytes(parts: list[bytes]) -> None:
    content = b"".join(parts)
    ids = _tokens(content)
    text = text_of_tokens(SPACED, ids)
    assert text == content.decode(errors="replace")
    stream = IncrementalText(SPACED)
    assert "".join([*map(stream.push, ids), stream.flush()]) == text


def test_other_tokenizers_decode_by_themselves() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("naïve → 漢字</s>")["input_ids"][:-2]
    for skips in (True, False):
        text = text_of_tokens(tokenizer, ids, skips_special=skips)
        assert text == tokenizer.decode(ids, skip_special_tokens=skips)


def test_the_common_beginning_ends_at_the_first_difference() -> None:
    assert [common_length("abc", text) for text in ("abd", "abc", "ab", "")] == [2, 3, 2, 0]
    assert common_length([1, 2], [3, 2]) == 0
