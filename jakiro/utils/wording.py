"""Numbers with their nouns, for messages: "1 prompt", "2 prompts"."""


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun, such as "1 prompt" or "2 prompts".

    Args:
        number: the number.
        noun: the noun in the singular.
        plural: the noun in the plural; None to add an s.
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"
