"""The parts that a measurement depends on, and with which alone a stored one is continued."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inference.drafters.identity import identity_of
from inference.protocol import Drafter
from jakiro.errors import DataError
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.files import fingerprint

PARTS = "parts"  # name in the JSON document
_LENGTH = 16  # number of digits of a fingerprint
_MOST_NAMED = 3  # largest number of parts that an error names


def parts_of(
    target: TargetAdapter,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[Sequence[int]],
    **settings: object,
) -> dict[str, str]:
    """Return what a measurement depends on: fingerprints and settings by their names.

    Args:
        target: measured target.
        drafters: drafters by their names in the result.
        prompts: token ids of each prompt.
        **settings: settings on which every figure depends.
    """
    hashed = {f"drafter {name}": identity_of(drafter) for name, drafter in drafters.items()}
    hashed |= {f"prompt {number}": list(prompt) for number, prompt in enumerate(prompts)}
    return {
        "target": target.spec.fingerprint,
        **{name: str(value) for name, value in settings.items()},  # drafters may depend on them
        **{name: fingerprint(part)[:_LENGTH] for name, part in hashed.items()},
    }


def continued_parts(
    path: Path, document: Mapping[str, Any], parts: Mapping[str, str]
) -> dict[str, str]:
    """Return the parts of a stored result and of the run that continues it.

    Drafters and prompts that are new, or that this run does not need, do no harm.

    Args:
        path: file with the stored result, for the error.
        document: the stored result.
        parts: parts of this run, as of `parts_of`.

    Raises:
        DataError: a part has changed, or the result does not say what it was measured with.
    """
    known: Mapping[str, str] | None = document.get(PARTS)
    if known is None:
        raise _other(path, "a result that names its parts", "a result without them")
    changed = [name for name, part in parts.items() if known.get(name, part) != part]
    if changed:
        shown = changed[:_MOST_NAMED]
        raise _other(
            path,
            ", ".join(f"{name}: {known[name]}" for name in shown),
            ", ".join(f"{name}: {parts[name]}" for name in shown),
        )
    return {**known, **parts}


def continued_document(path: Path, parts: Mapping[str, str], **empty: object) -> dict[str, Any]:
    """Return a stored result, with the parts of this run; an empty one if there is none.

    Args:
        path: file of the result.
        parts: parts of this run, as of `parts_of`.
        **empty: contents of an empty result.

    Raises:
        DataError: the stored result has other parts.
    """
    if not path.exists():
        return {PARTS: dict(parts), **empty}
    document: dict[str, Any] = json.loads(path.read_text())
    return document | {PARTS: continued_parts(path, document, parts)}


def _other(path: Path, expected: str, got: str) -> DataError:
    return DataError(
        f"{path} was not measured with the parts of this run, and cannot be continued",
        expected=expected,
        got=got,
        remedy="use the same target, drafters, prompts and options, or another --json file",
    )
