"""Text token by token: no character of a stop string is returned, and none is lost."""

from random import Random

import pytest
import torch
from helpers.tokenizers import spaced_tokenizer, tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from transformers import MaxLengthCriteria, StoppingCriteriaList

from inference.engine.request import StopRule
from inference.generation.incremental_text import IncrementalText, TextStopRule

TOKENIZER = tiny_tokenizer()
SPACED = spaced_tokenizer()
TEXTS = ["main(argument)", "aabaab", "naïve → ü", "漢字かな😀👩‍👩‍👧", "print(main(41), 'x')\n\n"]


def _ids(text: str) -> list[int]:
    return list(TOKENIZER(text)["input_ids"])


def _pieces(text: IncrementalText, token_ids: list[int]) -> list[str]:
    pieces = []
    for token in token_ids:
        pieces.append(text.push(token))
        assert text.length >= sum(map(len, pieces))
    return [*pieces, text.flush()]


@given(st.lists(st.sampled_from(TEXTS), max_size=12), st.integers(0, 2**32))
def test_the_pieces_are_the_text(parts: list[str], seed: int) -> None:
    ids = _ids("".join(parts))
    random = Random(seed)
    ids += [random.randrange(len(TOKENIZER)) for _ in range(random.randrange(60))]
    text = IncrementalText(TOKENIZER)
    assert "".join(_pieces(text, ids)) == TOKENIZER.decode(ids, skip_special_tokens=True)
    assert not text.is_holding


@pytest.mark.parametrize("between", [["</s>"], ["</s>"] * 40, ["▁"], ["<0xC3>", "</s>", "<0xBC>"]])
def test_spaces_are_kept_whatever_is_before_them(between: list[str]) -> None:
    for count in range(70):  # the window begins at another token each time
        ids = SPACED.convert_tokens_to_ids(["▁a"] * count + [*between, "▁b", "b"])
        text = IncrementalText(SPACED)
        assert "".join(_pieces(text, ids)) == SPACED.decode(ids, skip_special_tokens=True)
        assert len(text._window) < 40


@given(
    st.lists(st.sampled_from(["a", "b", "ab", "ü", "漢", "😀"]), max_size=30),
    st.lists(st.text("abü漢😀", min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_the_text_ends_before_the_first_stop_string(parts: list[str], stops: list[str]) -> None:
    ids = _ids("".join(parts))
    text = IncrementalText(TOKENIZER, stops)
    returned = "".join(_pieces(text, ids))
    assert not any(stop in returned for stop in stops)
    assert "".join(parts).startswith(returned)
    # The first character after the text begins a stop string.
    rest = "".join(parts)[len(returned) :]
    assert text.is_stopped == any(stop in "".join(parts) for stop in stops)
    if text.is_stopped:
        assert any(rest.startswith(stop) for stop in stops)
    else:
        assert rest == ""


def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_refuted() -> None:
    text = IncrementalText(TOKENIZER, ["xyz"])
    ids = [token for part in "wxyxyw" for token in _ids(part)]
    assert _pieces(text, ids) == ["w", "", "", "xy", "", "xyw", ""]


def test_the_offset_of_a_token_is_the_number_of_characters_before_it() -> None:
    def offsets(ids: list[int]) -> list[int]:
        text = IncrementalText(TOKENIZER, ["zz"])
        found = []
        for token in ids:
            text.push(token)
            found.append(text.offset)
        return found

    face, mark = _ids("😀"), _ids("!")
    assert offsets([*mark, *face, *mark]) == [0, *[1] * len(face), 2]
    assert offsets([face[0], *mark, *mark]) == [0, 1, 2]
    assert offsets([*mark, *_ids("z"), *mark]) == [0, 1, 2]


def test_the_cost_of_a_token_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    text = IncrementalText(TOKENIZER)
    for token in _ids("ab😀" * 200):
        text.push(token)
    assert len(text._window) < 64


def test_the_cost_of_bytes_that_are_no_characters_does_not_grow() -> None:
    text, byte = IncrementalText(SPACED), SPACED.convert_tokens_to_ids("<0x80>")
    found = "".join(text.push(byte) for _ in range(500))
    assert len(text._window) <= 33
    assert found + text.flush() == "\N{REPLACEMENT CHARACTER}" * 500


@pytest.mark.parametrize("count", range(28, 40))
def test_a_character_after_many_bytes_that_are_none_is_kept(count: int) -> None:
    *_, byte = _ids("😀")  # with byte-level BPE, the last bytes can be the beginning of a character
    assert TOKENIZER.decode([byte]) == "\N{REPLACEMENT CHARACTER}"
    ids = [byte] * count + _ids("😀") + _ids("!")
    assert "".join(_pieces(IncrementalText(TOKENIZER), ids)) == TOKENIZER.decode(ids)


def test_a_text_that_continues_another_one_keeps_its_first_space() -> None:
    before, words = SPACED.convert_tokens_to_ids(["a", "▁a"]), ["▁b", "b"]
    ids = SPACED.convert_tokens_to_ids(words)
    assert "".join(_pieces(IncrementalText(SPACED), ids)) == "bb"
    text = IncrementalText(SPACED, before=before)
    assert "".join(_pieces(text, ids)) == " bb"
    assert text.offset == 2
    stopped = IncrementalText(SPACED, [" b"], before=before)
    assert "".join(_pieces(stopped, ids)) == ""
    assert stopped.is_stopped
    face = [f"<0x{byte:02X}>" for byte in "😀".encode()]
    for names in (["a", "▁"], ["a", "</s>"], ["a", *face]):
        link = IncrementalText(SPACED, before=SPACED.convert_tokens_to_ids(names))
        assert "".join(_pieces(link, ids)) == " bb"
    # Nothing is continued if there is no text, or no whole character.
    for last in ("</s>", "<0xE4>"):
        begun = IncrementalText(SPACED, before=SPACED.convert_tokens_to_ids([last]))
        assert "".join(_pieces(begun, ids)) == "bb"


def test_a_rule_ends_with_the_token_that_completes_a_stop_string() -> None:
    criteria = StoppingCriteriaList([MaxLengthCriteria(9)])
    ids = _ids("a") + _ids("b") + _ids("c")
    rule = TextStopRule(StopRule(criteria, torch.device("cpu")), IncrementalText(TOKENIZER, ["bc"]))
    assert [rule(ids[: count + 1]) for count in range(3)] == [False, False, True]
    other = TextStopRule(StopRule(criteria, torch.device("cpu")), IncrementalText(TOKENIZER, ["x"]))
    assert [other([5] * count) for count in range(1, 10)] == [False] * 8 + [True]
