"""Runs commands of `jakiro` in this process."""

import pytest

from jakiro.cli import main


def exit_code(*words: str) -> int:
    """Run `jakiro` with these arguments and return its exit code."""
    with pytest.raises(SystemExit) as exit_info:
        main(list(words))
    return int(exit_info.value.code or 0)
