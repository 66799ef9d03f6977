"""The program that takes the picture of the playground ends its server in any case."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[2] / "docs" / "programs" / "playground.py"


@pytest.fixture
def program() -> Any:
    pytest.importorskip("playwright.sync_api")
    spec = spec_from_file_location("playground", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _server(tmp_path: Path, *lines: str) -> str:
    """Return a program that stands in for the server."""
    path = tmp_path / "server"
    path.write_text("\n".join(("#!/bin/sh", *lines)))
    path.chmod(0o755)
    return str(path)


@pytest.mark.timeout(20)
def test_an_error_while_the_picture_is_taken_ends_the_server(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = _server(tmp_path, "echo playground: http://here >&2", "exec sleep 60")
    monkeypatch.setattr(sys, "executable", server)
    error = pytest.raises(ValueError, match="http://here")
    with error, program.serving("model") as address:
        raise ValueError(address)


def test_a_server_that_does_not_start_is_an_error(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", _server(tmp_path, "exit 1"))
    with pytest.raises(SystemExit, match="has not started a server"), program.serving("model"):
        pass
