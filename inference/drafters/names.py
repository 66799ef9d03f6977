"""Names of drafters. Importing them is fast, for checks before the models are loaded."""

import re
from pathlib import Path
from typing import NamedTuple

ADED, LOOKUP, LM = "aded", "lookup", "lm"
UNTRAINED = (ADED, LOOKUP, LM)

_NAME = re.compile(r"(aded|lookup|aded=.+|lm=.+)")
_PAIR = re.compile(r"(aded|lookup|aded=.+?)\+((?:drafter|lm)=.+)")


class UntrainedName(NamedTuple):
    """The name of a drafter that needs no training.

    Attributes:
        kind: `aded`, `lookup` or `lm`.
        path: for `aded`, file of the trigrams with which the table starts, or None to start with an
            empty table; for `lm`, folder or hub id of the small model.
        settings: YAML file of the drafter's settings; None for the defaults.
        num_nodes: largest number of candidates in a tree; None for the number in the settings.
    """

    kind: str
    path: str | None = None
    settings: Path | None = None
    num_nodes: int | None = None

    @classmethod
    def parse(cls, text: str) -> "UntrainedName | None":
        """Parse `aded`, `aded=TABLE`, `lookup` or `lm=MODEL`; return None for anything else.

        `lm` belongs to these names because the small model needs no training for drafting.
        """
        if not _NAME.fullmatch(text):
            return None
        kind, _, path = text.partition("=")
        return cls(kind, path or None)


class PairName(NamedTuple):
    """The names of two drafters that share trees.

    Attributes:
        second: second, training-free drafter: `aded`, `aded=TABLE` or `lookup`.
        first: first drafter: `drafter=DRAFTER` or `lm=MODEL`.
    """

    second: str
    first: str

    @classmethod
    def parse(cls, text: str) -> "PairName | None":
        """Parse a pair such as `aded+drafter=DRAFTER`; return None for a single drafter."""
        match = _PAIR.fullmatch(text)
        return None if match is None else cls(match[1], match[2])
