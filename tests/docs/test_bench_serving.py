"""The program that kills a server under load loses nothing, and says what does not hold."""

import json
from pathlib import Path
from types import ModuleType

import pytest
from helpers.adaptation import save_pair
from helpers.programs import load_program

from inference.benchmark.server.document import DecidedSteps, LoadDocument

SMALL = ["--clients", "4", "--tokens", "24", "--places", "2", "--capacity", "256"]


@pytest.fixture(scope="module")
def program() -> ModuleType:
    return load_program("bench_serving")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments of the program, for a tiny target."""
    folder = save_pair(tmp_path_factory.mktemp("serving"))
    prompts = folder / "prompts.txt"
    prompts.write_text("def main(\nprint(\n")
    return ["--target", str(folder / "target"), "--prompts", str(prompts), *SMALL]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_nothing_is_lost_with_a_server_that_is_killed(
    program: ModuleType,
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "load.json"
    kills = ["--kills", "1", "--kill-after", "5", "--lost-share", "0.3", "--json", str(file)]
    assert program.main([*words, *kills]) == 0
    printed = capsys.readouterr()
    assert "answers equal to those alone: 2 of 2 greedy, 2 of 2 sampled" in printed.out
    assert "the server was killed 1 times" in printed.err
    document = LoadDocument.model_validate_json(file.read_text())
    assert document.figures.device is not None
    assert document.figures.device.resumes > 0
    assert document.decided is None
    assert json.loads(file.read_text())["settings"]["lost_share"] == 0.3


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_what_does_not_hold_is_named(program: ModuleType, words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "load.json"
    assert program.main([*words, "--json", str(file)]) == 0
    document = LoadDocument.model_validate_json(file.read_text())
    assert document.figures.device is not None
    log = tmp_path / "server.log"
    log.write_text("")
    server = type("Server", (), {"num_kills": 0, "log": log})()
    assert list(program.failures(document, server, 0)) == []
    twice = DecidedSteps(decided=document.figures.device.steps + 1, replayed=0)
    wrong = document.model_copy(update={"decided": twice})
    found = list(program.failures(wrong, server, 0))
    assert any("decided each step exactly once" in failure for failure in found)
    log.write_text("Traceback")
    found = list(program.failures(document, server, 2))
    assert any("killed 0 times instead of 2" in failure for failure in found)
    assert any("no text was continued" in failure for failure in found)
    assert any("traceback" in failure for failure in found)


def test_a_server_that_does_not_start_is_an_error(
    program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--target", str(tmp_path / "none"), "--prompts", str(tmp_path / "none.txt")]
    assert program.main([*words, "--clients", "1"]) == 2
    assert "error: the server does not start" in capsys.readouterr().err
