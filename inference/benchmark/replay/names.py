"""Drafters and sizes of trees as users write them, which are read without loading a model."""

import re
from typing import NamedTuple

from inference.benchmark.replay.document import ReplaySettings
from inference.trees.limits import MAX_PASSES, MOST_CANDIDATES
from jakiro.errors import ConfigError

_SIZE = re.compile(r"candidates=([0-9]{1,9})(?:,levels=([0-9]{1,9}))?")


class Training(NamedTuple):
    """A trained drafter.

    Attributes:
        name: name of the drafter, which its trainings with other seeds have, too.
        path: folder or hub id.
    """

    name: str
    path: str


class Size(NamedTuple):
    """The size of trees.

    Attributes:
        candidates: largest number of nodes.
        levels: number of passes of the drafter; None for the number that it was trained for.
    """

    candidates: int
    levels: int | None

    @classmethod
    def parse(cls, text: str) -> "Size":
        """Return the size that is written as `candidates=N` or `candidates=N,levels=M`.

        Raises:
            ConfigError: the text is malformed, or a number is too large.
        """
        found = _SIZE.fullmatch(text)
        candidates, levels = (None, None) if found is None else found.groups()
        size = cls(int(candidates or 0), None if levels is None else int(levels))
        if not (
            1 <= size.candidates <= MOST_CANDIDATES
            and 1 <= (1 if size.levels is None else size.levels) <= MAX_PASSES
        ):
            raise ConfigError(
                f"--trees {text} cannot be used",
                expected="candidates=N or candidates=N,levels=M, with N from 1 to "
                f"{MOST_CANDIDATES} and M from 1 to {MAX_PASSES}; candidates are deterministic",
                got=text,
            )
        return size


def trainings_of(settings: ReplaySettings) -> list[Training]:
    """Return all trained drafters, which are not loaded.

    Raises:
        ConfigError: a drafter is malformed or given twice, or the drafters have different numbers
            of trainings.
    """
    trainings = [_training(text) for text in settings.drafters]
    if repeated := [own for own in trainings if trainings.count(own) > 1]:
        raise ConfigError(
            "the same drafter is given twice with the same name",
            expected="a different path for each training",
            got=f"{repeated[0].name}={repeated[0].path}",
            remedy="leave one of them out, or give it another name",
        )
    names = [own.name for own in trainings]
    if len({names.count(name) for name in names}) > 1:
        raise ConfigError(
            "the drafters have different numbers of trainings",
            expected="as many paths for each name",
            got=", ".join(f"{name}: {names.count(name)}" for name in dict.fromkeys(names)),
            remedy="pass --drafter NAME=PATH for each seed of each drafter",
        )
    return trainings


def _training(text: str) -> Training:
    name, _, path = text.partition("=")
    if not name or not path or "/" in name:
        raise ConfigError(
            f"--drafter {text} cannot be used",
            expected="NAME=PATH, with a name without slashes",
            got=text,
            remedy="put a name and an equals sign before the path",
        )
    return Training(name, path)
