"""Texts of prompts and answers are those of the last chat turn, and they are short."""

from typing import Any

import pytest

from inference.benchmark.samples import Continuation, Sample
from inference.benchmark.texts import answer_of, question_of
from inference.engine.stats import DecodeStats
from inference.generation.prompt_file import BenchPrompt, prompt_of

QUESTION = {"role": "user", "content": "and why?"}


def _decoded(token_ids: list[int]) -> str:
    return "".join(map(chr, token_ids))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (prompt_of("def main("), "def main("),
        (prompt_of([97, 98]), "ab"),
        (prompt_of([{"role": "user", "content": "how?"}, QUESTION]), "and why?"),
        (prompt_of([QUESTION, {"role": "tool", "content": "{}"}]), "and why?"),
        (prompt_of([{"role": "system", "content": "be good"}]), ""),
        (BenchPrompt([QUESTION], ("when?", "where?"), "all", "0"), "where?"),
    ],
)
def test_the_question_is_the_text_or_the_last_message_of_the_user(
    prompt: Any, expected: str
) -> None:
    assert question_of(prompt, _decoded) == expected


def test_long_texts_lose_their_middle() -> None:
    text = question_of(prompt_of("a" * 5000 + "b" * 5000), _decoded)
    assert len(text) <= 1000
    assert text.startswith("aaa")
    assert text.endswith("bbb")
    assert text.count("[…]") == 1


def test_halves_of_surrogate_pairs_can_be_stored() -> None:
    assert question_of(prompt_of("a\ud800"), _decoded) == "a?"


def test_the_answer_is_that_of_the_last_chat_turn() -> None:
    turns = [Continuation(ids, [], DecodeStats()) for ids in ([97], [98, 99])]
    assert answer_of(Sample(prompt_of("a"), 0, 0, turns, 1.0), _decoded) == "bc"
