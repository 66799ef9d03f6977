"""Detection of texts that seem to name persons, about whom small models tend to invent facts.

A name is assumed to be two successive capitalized words that are hardly ever written in lower case,
or a capitalized word after a title or initials. Names of places and works are found as well. Names
of a single word, and names that consist of ordinary words, are not found.
"""

import re
from collections import Counter
from collections.abc import Iterable, Set

_WORD = re.compile(r"[^\W\d_]+(?:[-'\u2019][^\W\d_]+)*")
_NAME = r"[^\W\d_a-z]['\u2019]?[^\W\d_]*[^\W\d_A-Z]{2}"  # also "O'Brien" and "Émile"
_PAIR = re.compile(
    rf"\b({_NAME}(?:-{_NAME})?) (?:[A-Z]\. )*(?:(?:van|von|de|da|la|bin|al) )*(?=({_NAME}))"
)
_TITLED = re.compile(
    r"\b(?:Mr|Mrs|Ms|Dr|Prof|Sir|Dame|Lord|Lady|Saint|St|Pope|King|Queen|Prince|Princess|Emperor|"
    r"President|Senator|Chancellor|Professor|Doctor|Captain|General)\.? [A-Z][^\W\d_A-Z]+"
)
_INITIALS = re.compile(r"\b[A-Z]\.(?: ?[A-Z]\.)* [A-Z][^\W\d_A-Z]{2,}")  # as in "J. R. Smith"


def common_words(texts: Iterable[str]) -> frozenset[str]:
    """Return the words, lowercased, that are in lower case in at least 10% of their occurrences.

    Args:
        texts: many texts of the kind to be checked.
    """
    words: Counter[str] = Counter()
    lower: Counter[str] = Counter()
    for text in texts:
        for word in _WORD.findall(text):
            words[word.lower()] += 1
            lower[word] += word.islower()
    return frozenset(word for word, count in words.items() if 10 * lower[word] >= count)


def names_person(text: str, common: Set[str]) -> bool:
    """Return whether the text seems to name a person.

    Args:
        text: text to check.
        common: words that are not names, in lower case; see `common_words`.
    """
    if _TITLED.search(text) or _INITIALS.search(text):
        return True
    return any(
        all(word[0].isupper() and word.lower() not in common for word in pair)
        for pair in _PAIR.findall(text)
    )
