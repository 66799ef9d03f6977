"""Parts of messages: numbers with their nouns, names of dtypes, summaries of errors."""

from typing import TypeVar

SHORT_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # of dtypes
_LONG_NAMES = {short: long for long, short in SHORT_NAMES.items()}

ValueT = TypeVar("ValueT")


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun, such as "1 prompt" or "2 prompts"."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def rounded(count: int) -> str:
    """Return a count with three significant digits and a suffix, such as 135M."""
    value = float(f"{count:.3g}")
    for suffix, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:#.3g}".rstrip(".") + suffix
    return str(count)


def dtype_name(dtype: object) -> str:
    """Return torch's name of a `torch.dtype`, such as bfloat16."""
    return str(dtype).removeprefix("torch.")


def long_dtype(value: str) -> str:
    """Return torch's name of a dtype, such as bfloat16 for bf16; other values are unchanged."""
    return _LONG_NAMES.get(value, value)


def short_dtype(value: ValueT) -> ValueT | str:
    """Return the short name of a dtype, such as bf16 for bfloat16; other values are unchanged."""
    return SHORT_NAMES.get(value, value) if isinstance(value, str) else value


def summary_of(error: Exception) -> str:
    """Return the message of an error on one line: its first line, or all if a list follows it."""
    first, *others = str(error).strip().splitlines() or [""]
    if first.rstrip().endswith(":"):  # a list follows
        first = " ".join(" ".join((first, *others)).split())
    if isinstance(error, OSError | ValueError) and first:
        return first
    return f"{type(error).__name__}: {first}".removesuffix(": ")
