"""A chat template that does not end is stopped, in every thread and by every caller."""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from helpers.tokenizers import tiny_tokenizer
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from inference.generation.prompts import encode_prompt
from jakiro.errors import DataError, PromptError
from jakiro.utils import chat_templates
from jakiro.utils.chat_templates import apply_chat_template
from training.data.chat import chat_of
from training.data.rendering import render_chat
from training.data.sources import Record

CHAT = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
LOOPS = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
TEXTS = "{% for a in 'x' * 100000 %}{% for b in 'x' * 100000 %}{% endfor %}{% endfor %}"
MACROS = (
    "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}"
)


@pytest.fixture(autouse=True)
def _short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_templates, "SECONDS", 0.2)


def _apply(template: str) -> None:
    apply_chat_template(tiny_tokenizer(template), CHAT, tokenize=False)


@pytest.mark.parametrize("template", [LOOPS, TEXTS, MACROS])
def test_a_template_that_does_not_end_is_stopped_in_every_thread(template: str) -> None:
    before, started = sys.gettrace(), time.monotonic()
    with pytest.raises(TemplateError, match=r"has not ended after 0\.2 seconds"):
        _apply(template)
    assert sys.gettrace() is before
    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(_apply, template) for _ in range(2)]:
            with pytest.raises(TemplateError, match="has not ended"):
                future.result()
    assert time.monotonic() - started < 30


def _as_prompt(tokenizer: PreTrainedTokenizerBase) -> Any:
    return encode_prompt(CHAT, tokenizer, len(tokenizer))


def _as_data(tokenizer: PreTrainedTokenizerBase) -> Any:
    return render_chat(tokenizer, chat_of(Record({"messages": CHAT}, "chats.jsonl:7"), "messages"))


@pytest.mark.parametrize(("use", "error"), [(_as_prompt, PromptError), (_as_data, DataError)])
def test_prompts_and_data_with_such_a_template_are_refused(
    use: Callable[[PreTrainedTokenizerBase], Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"the chat template rejects .*has not ended after"):
        use(tiny_tokenizer(LOOPS))
