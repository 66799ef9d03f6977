"""The two names of a dtype: that of torch, such as bfloat16, and a short one, such as bf16."""

from typing import TypeVar

SHORT_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_LONG_NAMES = {short: long for long, short in SHORT_NAMES.items()}

ValueT = TypeVar("ValueT")


def dtype_name(dtype: object) -> str:
    """Return torch's name of a `torch.dtype`, such as bfloat16."""
    return str(dtype).removeprefix("torch.")


def long_dtype(value: str) -> str:
    """Return torch's name of a dtype, such as bfloat16 for bf16; other values are unchanged."""
    return _LONG_NAMES.get(value, value)


def short_dtype(value: ValueT) -> ValueT | str:
    """Return the short name of a dtype, such as bf16 for bfloat16; other values are unchanged."""
    return SHORT_NAMES.get(value, value) if isinstance(value, str) else value
