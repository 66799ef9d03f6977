"""Names of drafters."""

import re
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from jakiro.errors import CheckpointError, ConfigError
from jakiro.utils.packaged import packaged_drafter, packaged_names

TARGET_REMEDY = (
    "pass --target on the command line, or target= in Python, with the target's folder or id"
)
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
        found = _PAIR.fullmatch(text)
        return None if found is None else cls(found[1], found[2])


def refuse_misspelt(name: str) -> None:
    """Raise an error for a name that is similar to that of a known drafter.

    Args:
        name: folder or hub id of a trained drafter, or another name.

    Raises:
        ConfigError: nothing exists at this path, and the name is similar to `aded`, `lookup` or
            the name of a drafter in this package.
    """
    if "/" in name or Path(name).exists() or packaged_drafter(name) is not None:
        return
    known = (ADED, LOOKUP, *packaged_names())
    similar = get_close_matches(name.partition("=")[0].lower(), known, n=1, cutoff=0.7)
    if similar:
        raise ConfigError(
            f"there is no drafter {name}",
            expected="a folder, a hub id such as owner/name, aded, aded=TABLE, lookup or lm=MODEL",
            got=name,
            remedy=f"use {similar[0]}",
        )


def without_target(drafter: str) -> ConfigError:
    """Return the error for a drafter that needs no training and was given no target."""
    return ConfigError(
        f"a target must be given, because the drafter {drafter} does not name one",
        expected="a target",
        got="no target",
        remedy="pass --target on the command line, or target= in Python",
    )


def unusable_table(path: str | Path, got: str) -> CheckpointError:
    """Return the error for a file of trigrams that cannot be loaded.

    Args:
        path: path of the file.
        got: description of the fault.
    """
    return CheckpointError(
        f"cannot load trigrams from {path}",
        expected="a file that `jakiro prepare trigrams` wrote",
        got=got,
        remedy="check the path, or build the file again",
    )
