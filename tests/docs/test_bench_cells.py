"""The program that measures cells chooses prompts by a seed, and goes on where it was stopped."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from helpers.adaptation import save_pair
from helpers.programs import load_program

from jakiro.errors import ConfigError, DataError, JakiroError


@pytest.fixture(scope="module")
def program() -> Any:
    return load_program("bench_cells")


def _prompts(folder: Path, count: int) -> Path:
    path = folder / "all.jsonl"
    lines = [{"turns": [f"question {number}", "and then?"]} for number in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _numbers(content: str) -> list[int]:
    return [int(json.loads(line)["turns"][0].split()[1]) for line in content.splitlines()]


def _arguments(folder: Path, **changes: Any) -> Namespace:
    given = {"target": "T", "drafter": "D", "table": None, "tokens": 64, "dtype": "auto"}
    given |= {
        "num_prompts": 2,
        "decode": None,
        "seed": 0,
        "folder": folder / "results",
        "setting": ["T=0"],
    }
    return Namespace(**given | {"prompts": [f"own={folder / 'all.jsonl'}"]} | changes)


def test_prompts_are_a_seeded_choice_after_the_first_quarter(program: Any, tmp_path: Path) -> None:
    path = _prompts(tmp_path, 18)
    chosen = program.choose_prompts(path, 6, seed=0)
    numbers = _numbers(chosen)
    assert len(set(numbers)) == 6
    assert numbers == sorted(numbers)
    assert min(numbers) >= 5  # 4.5 prompts are a quarter
    assert all(len(json.loads(line)["turns"]) == 2 for line in chosen.splitlines())
    assert program.choose_prompts(path, 6, seed=0) == chosen
    assert program.choose_prompts(path, 6, seed=1) != chosen
    assert _numbers(program.choose_prompts(path, 13, seed=0)) == list(range(5, 18))
    with pytest.raises(DataError, match="14 prompts in its last three quarters; got: 13"):
        program.choose_prompts(path, 14, seed=0)


def test_a_setting_becomes_options_of_the_command(program: Any) -> None:
    expected = ["--temperature", "0.2", "--top-p", "0.9"]
    assert program.setting_options("T=0.2,top_p=0.9") == expected
    for malformed in ("", "0.2", "top_p=0.9", "T=", "T=0,tau=1"):
        with pytest.raises(ConfigError, match="a setting such as T=0"):
            program.setting_options(malformed)


def test_cells_have_files_of_their_own(program: Any, tmp_path: Path) -> None:
    _prompts(tmp_path, 8)
    arguments = _arguments(tmp_path, setting=["T=0", "T=0.2,top_p=0.9"], table="tri")
    cells = program.cells_of(arguments)
    assert [cell.path.name for cell in cells] == ["own-t0.json", "own-t0.2-top_p0.9.json"]
    for cell in cells:
        assert "aded=tri,name=aded-warm" in cell.options
        assert "lookup+drafter=D,name=trained-lookup" in cell.options
    (fewer,) = program.cells_of(_arguments(tmp_path, decode=1))
    assert fewer.options[-4:-2] == ["--num-prompts", "1"]
    for malformed in ("all.jsonl", "a/b=all.jsonl", "own="):
        with pytest.raises(ConfigError, match="NAME=FILE"):
            program.cells_of(_arguments(tmp_path, prompts=[malformed]))


def test_results_of_other_prompts_are_not_continued(program: Any, tmp_path: Path) -> None:
    _prompts(tmp_path, 8)
    program.cells_of(_arguments(tmp_path))
    program.cells_of(_arguments(tmp_path))
    with pytest.raises(DataError, match="other prompts"):
        program.cells_of(_arguments(tmp_path, num_prompts=3))


@pytest.mark.timeout(60)
def test_a_cell_that_failed_has_no_result(program: Any, tmp_path: Path) -> None:
    _prompts(tmp_path, 8)
    arguments = _arguments(tmp_path, target=str(tmp_path / "none"))
    with pytest.raises(JakiroError, match="own at T=0 was not measured"):
        program.run(arguments)
    assert not (tmp_path / "results" / "own-t0.json").exists()


@pytest.mark.slow
def test_cells_are_measured_once_and_shown_in_tables(
    program: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    pair, results = save_pair(tmp_path), tmp_path / "results"
    path = _prompts(tmp_path, 6)
    words = [
        *("--target", str(pair / "target"), "--drafter", str(pair / "drafter")),
        *(word for name in ("one", "two") for word in ("--prompts", f"{name}={path}")),
        *("--num-prompts", "2", "--tokens", "6", "--folder", str(results)),
    ]
    capfd.readouterr()
    program.main([*words, "--setting", "T=0"])
    first = capfd.readouterr().out.splitlines()
    assert first[0] == "T = 0:"
    assert first[2].startswith("| method | one: tau | one: tokens/s | one: speed-up | two: tau |")
    assert first[4].startswith("| transformers | 1.00 | ")
    assert [line.split(" | ")[0] for line in first[-2:]] == [
        "| trained drafter",
        "| lookup + trained drafter",
    ]
    assert len(first) == 4 + len(program.methods("D", None))
    measured: list[str] = []
    measure = program.measure
    monkeypatch.setattr(
        program, "measure", lambda cell: (measured.append(cell.path.name), measure(cell))
    )
    (results / "two-t0.json").unlink()  # as if the run had been interrupted
    (results / ".two-t0.json.partial").write_text("{")
    program.main([*words, "--setting", "T=0", "--setting", "T=1,top_k=9"])
    assert measured == ["two-t0.json", "one-t1-top_k9.json", "two-t1-top_k9.json"]
    printed = capfd.readouterr().out
    assert printed.count("| method |") == 2
    assert "\n\nT = 1, top_k = 9:\n\n| method |" in printed
    assert [path.name for path in results.glob(".*partial*")] == []
    with pytest.raises(DataError, match=r"another command; expected: .* 7 .* 6 "):
        program.main([*words, "--setting", "T=0", "--tokens", "7"])
    assert len(measured) == 3
