"""Application of chat templates, with a time limit because templates are programs."""

import sys
import time
from types import FrameType
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

SECONDS = 10.0  # time limit of a template; real ones take milliseconds

# Errors that templates raise on purpose, and errors caused by messages of an unexpected form.
TEMPLATE_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    NameError,
    RecursionError,
    TypeError,
    ValueError,
)

_TEMPLATE = "<template>"  # file name that Jinja gives to the code of a template


def apply_chat_template(
    tokenizer: PreTrainedTokenizerBase, messages: list[Any], **options: Any
) -> Any:
    """Return the result of the tokenizer's method of the same name.

    Jinja limits the length of a single range, but not the length of nested loops. A trace function,
    which belongs to the calling thread only, therefore looks at the time in each line of the
    template.
    """
    end = time.monotonic() + SECONDS

    def in_line(_frame: FrameType, _event: str, _value: object) -> Any:
        if time.monotonic() > end:
            raise TemplateError(f"the template has not ended after {SECONDS:g} seconds")
        return in_line

    def in_call(frame: FrameType, _event: str, _value: object) -> Any:
        return in_line if frame.f_code.co_filename == _TEMPLATE else None

    apply: Any = tokenizer.apply_chat_template
    before = sys.gettrace()
    sys.settrace(in_call)
    try:
        return apply(messages, **options)
    finally:
        sys.settrace(before)
