"""Requests name only what was chosen, in the form of completions or of chats."""

from typing import Any

import pytest

from inference.client.request import ServerRequest, prompt_for

MESSAGES = [{"role": "user", "content": "Why?"}]


def test_a_text_is_continued_and_options_without_a_value_are_left_out() -> None:
    request = ServerRequest("Once", 5, is_streamed=False)
    assert request.path == "completions"
    assert request.body("tiny") == {"model": "tiny", "prompt": "Once", "max_tokens": 5}


def test_messages_are_answered_in_a_stream_with_usage() -> None:
    request = ServerRequest(MESSAGES, 5, temperature=0.0, seed=3, others={"top_k": 2})
    assert request.path == "chat/completions"
    assert request.body("tiny") == {
        "model": "tiny",
        "messages": MESSAGES,
        "max_tokens": 5,
        "temperature": 0.0,
        "seed": 3,
        "top_k": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize(("prompt", "wanted"), [("Once", 1), (MESSAGES, True), ([1, 2], 1)])
def test_log_probabilities_are_requested_in_the_form_of_the_path(prompt: Any, wanted: Any) -> None:
    request = ServerRequest(prompt, 5, has_log_probs=True)
    assert request.body("tiny")["logprobs"] is wanted


def test_a_text_becomes_a_message_only_if_this_is_wanted() -> None:
    assert prompt_for("Why?", as_chat=True) == MESSAGES
    assert prompt_for("Why?", as_chat=False) == "Why?"
    assert prompt_for([1, 2], as_chat=True) == [1, 2]
