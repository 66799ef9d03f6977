"""A program in the place of the one that learns: it does what its mode says, without any model.

Its arguments are the mode, and a folder with `weights.safetensors`, the weights of its versions.
It appends a byte to the file `alive` in that folder every few milliseconds while it runs.
With the mode `late`, it ends as soon as that folder has a file `finish`.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from safetensors.numpy import load, save

from training.launch import end_with_parent


def main() -> None:
    """Read a lesson from standard input, and do what the mode says."""
    end_with_parent()
    mode, folder = sys.argv[1], Path(sys.argv[2])
    lesson = json.loads(sys.stdin.buffer.read())
    if mode == "crash":
        sys.exit(3)
    while mode == "slow" or (mode == "late" and not (folder / "finish").exists()):
        _beat(folder)
    _beat(folder)
    data = (folder / "weights.safetensors").read_bytes()
    is_harmful = mode == "harmful after 1" and lesson["parent"] == 1
    number = 0 if mode == "nothing" or is_harmful else lesson["number"]
    if number:
        _write(Path(lesson["folder"]), lesson, data)
    outcome = "better" if number else "harmful" if is_harmful else "not_better"
    result = {"outcome": outcome, "version": number or None, "before": 2.0, "after": 2.5}
    sys.stdout.write(json.dumps({**result, "low": 1.1}) + "\n")


def _beat(folder: Path) -> None:
    with (folder / "alive").open("a") as file:
        file.write(".")
    time.sleep(0.005)


def _write(versions: Path, lesson: dict[str, Any], data: bytes) -> None:
    record = {
        "number": lesson["number"],
        "parent": lesson["parent"],
        "identity": lesson["identity"],
        "tenants": lesson["tenants"],
        "before": 2.0,
        "after": 2.5,
        "low": 1.1,
    }
    (versions / f"{lesson['number']:06d}.safetensors").write_bytes(
        save(load(data), {"record": json.dumps(record)})
    )


if __name__ == "__main__":
    main()
