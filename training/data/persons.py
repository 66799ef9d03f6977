"""Detection of texts that name persons, since a small model invents facts about them.

A name is taken to be two successive capitalized words that occur in no text in lower case, or such
a word after a title. Names of places and works are found as well; few names of persons are missed.
"""

import re
from collections import Counter
from collections.abc import Iterable, Set

_WORD = re.compile(r"[^\W\d_]+(?:[-'\u2019][^\W\d_]+)*")
_PAIR = re.compile(
    r"\b([A-Z][^\W\d_A-Z]+(?:-[A-Z][^\W\d_]+)?) (?:[A-Z]\. )*(?:(?:van|von|de|da|la|bin|al) )*"
    r"(?=([A-Z][^\W\d_A-Z]+))"
)
_TITLED = re.compile(
    r"\b(?:Mr|Mrs|Ms|Dr|Prof|Sir|Dame|Lord|Lady|Saint|St|Pope|King|Queen|Prince|Princess|Emperor|"
    r"President|Senator|Chancellor|Professor|Doctor|Captain|General)\.? [A-Z][^\W\d_A-Z]+"
)
_INITIALS = re.compile(r"\b[A-Z]\.(?: ?[A-Z]\.)* [A-Z][^\W\d_A-Z]{2,}")  # as in "J. R. Smith"


def common_words(texts: Iterable[str]) -> frozenset[str]:
    """Return the words, in lower case, that occur at least once in lower case in the texts.

    Args:
        texts: many texts of the kind to be checked.
    """
    words: Counter[str] = Counter()
    for text in texts:
        words.update(word for word in _WORD.findall(text) if word.islower())
    return frozenset(words)


def names_person(text: str, common: Set[str]) -> bool:
    """Return whether the text seems to name a person.

    Args:
        text: text to check.
        common: words that are no names, in lower case; see `common_words`.
    """
    if _TITLED.search(text) or _INITIALS.search(text):
        return True
    return any(
        first.lower() not in common and second.lower() not in common
        for first, second in _PAIR.findall(text)
    )
