"""Numbers with their nouns, for messages: "1 prompt", "2 prompts"."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 prompt" or "2 prompts".

    Args:
        number: the number.
        noun: the noun in the singular; its plural must end in s.
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
