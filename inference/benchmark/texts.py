"""Texts of prompts and answers for the document, shortened so that the document stays small."""

from collections.abc import Callable
from typing import Any

from inference.benchmark.samples import Sample
from inference.generation.prompt_file import BenchPrompt

Decode = Callable[[list[int]], str]

_LONGEST = 1000  # characters of a text
_CUT = " […] "


def question_of(prompt: BenchPrompt, decode: Decode) -> str:
    """Return the text of a prompt; of a chat, the user's last message.

    Args:
        prompt: prompt of a comparison.
        decode: conversion of token ids to text.
    """
    first: Any = prompt.first
    if prompt.later_turns:
        text = prompt.later_turns[-1]
    elif isinstance(first, str):
        text = first
    elif isinstance(first[0], dict):
        questions = [message.get("content") for message in first if message["role"] == "user"]
        text = str(questions[-1]) if questions else ""
    else:
        text = decode(list(first))
    return _shortened(text)


def answer_of(sample: Sample, decode: Decode) -> str:
    """Return the text of the answer to the last chat turn.

    Args:
        sample: one decoding of a prompt.
        decode: conversion of token ids to text.
    """
    return _shortened(decode(sample.token_ids[-1]))


def _shortened(text: str) -> str:
    """Return text without its middle if it is long, and without parts that are not UTF-8."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    if len(text) <= _LONGEST:
        return text
    half = (_LONGEST - len(_CUT)) // 2
    return text[:half] + _CUT + text[-half:]
