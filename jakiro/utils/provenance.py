"""Provenance of a result: the command, the code version, the library versions, and the machine."""

import json
import os
import platform
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from jakiro.utils.files import ensure_writable_folder, write_atomically
from jakiro.utils.settings import Settings, dump_settings

_DISTRIBUTIONS = ("jakiro", "torch", "transformers", "deepspeed")
_CODE = Path(__file__).resolve().parents[2]  # the folder that contains the packages
_SECONDS_FOR_GIT = 10


def provenance() -> dict[str, Any]:
    """Return the information that is needed to repeat this run, as JSON-serializable data."""
    return {
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": _git_state(_CODE),
        "versions": {"python": platform.python_version()}
        | {name: _version(name) for name in _DISTRIBUTIONS},
        "platform": platform.platform(),
        "num_cpus": os.cpu_count(),
    }


def write_provenance(folder: Path, resolved_settings: Settings) -> None:
    """Write `provenance.json` and `config.yaml` into a run's folder."""
    folder = ensure_writable_folder(folder)
    write_atomically(folder / "config.yaml", dump_settings(resolved_settings))
    write_atomically(folder / "provenance.json", json.dumps(provenance(), indent=2) + "\n")


def _version(distribution: str) -> str | None:
    # Versions are read from the metadata, because importing torch takes seconds.
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(distribution)
    return None


@cache  # changes of files after the first record are no part of the code that runs
def _git_state(folder: Path) -> dict[str, str | bool] | None:
    # An installed copy may be inside the checkout of another project, whose state is irrelevant.
    if not (folder / ".git").exists():
        return None
    try:
        sha = _git(folder, "rev-parse", "HEAD")
        changes = _git(folder, "status", "--porcelain")
    except (OSError, subprocess.SubprocessError):  # git is missing, or there is no commit yet
        return None
    return {"sha": sha, "is_dirty": bool(changes)}


def _git(folder: Path, *arguments: str) -> str:
    finished = subprocess.run(
        ["git", "--no-optional-locks", "-C", str(folder), *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=_SECONDS_FOR_GIT,
    )
    return finished.stdout.strip()
