"""The program that measures pass@1 runs the tests of each problem, and goes on where it stopped."""

import gzip
import json
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
from helpers.adaptation import save_pair

from jakiro.errors import ConfigError, DataError

PROGRAMS = Path(__file__).parents[2] / "docs" / "programs"
RIGHT = "def double(a):\n    return 2 * a\n"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The program as a module, which imports another program."""
    monkeypatch.syspath_prepend(PROGRAMS)
    yield import_module("bench_accuracy")
    for name in ("bench_accuracy", "bench_offline"):
        sys.modules.pop(name, None)


def _row(name: str = "double") -> dict[str, str]:
    return {
        "task_id": f"Test/{name}",
        "prompt": f'from typing import List\n\n\ndef {name}(a: int) -> int:\n    """Double."""\n',
        "test": "def check(candidate):\n    assert candidate(3) == 6\n",
        "entry_point": name,
    }


def _problems(folder: Path, *names: str) -> Path:
    path = folder / "problems.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(json.dumps(_row(name)) for name in names).encode()))
    return path


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (f"Here it is:\n```python\n{RIGHT}```\nIt doubles.", True),
        (f"```\n{RIGHT}```", True),
        (f"```python\n{RIGHT}", True),  # the block has no end
        (RIGHT, True),
        ("```python\ndef double(a: List) -> List:\n    return 2 * a\n```", True),
        (f"```Python3\r\n{RIGHT}```", True),
        (f"1. Code:\n   ```python\n{indent(RIGHT, '   ')}   ```", True),
        (f"```python\n{RIGHT}\nif __name__ == '__main__':\n    input()\n```", True),
        ("```python\ndef double(a):\n    return a\nexit()\n```", False),
        ("```python\ndef double(a):\n    return a\n```", False),
        ("```python\ndef double(a):\n    return 2 *", False),
        ("```python\nimport sys\nsys.exit(1)\n```", False),
        ("It doubles.", False),
        ("", False),
        ("```python\ndef double(a):\n    while True: pass\n```", False),
        ("\ud800", False),  # no valid text
    ],
)
def test_an_answer_is_right_if_the_tests_of_its_code_pass(
    program: Any, tmp_path: Path, answer: str, expected: bool
) -> None:
    (problem,) = program.read_problems(_problems(tmp_path, "double"))
    assert program.is_right(problem, answer, seconds=2) == expected


def test_what_an_answer_has_started_ends_with_it(program: Any, tmp_path: Path) -> None:
    (problem,) = program.read_problems(_problems(tmp_path, "double"))
    late = tmp_path / "late"
    start = f"import subprocess; subprocess.Popen(['sh', '-c', 'sleep 1; touch {late}'])"
    assert program.is_right(problem, f"```python\n{start}\n{RIGHT}```")
    time.sleep(1.5)
    assert not late.exists()


def test_a_file_that_contains_no_problems_is_refused(program: Any, tmp_path: Path) -> None:
    for content in (b"{", b'{"prompt": "a"}', b"[1]", b"\xff"):
        (tmp_path / "bad.jsonl").write_bytes(content)
        with pytest.raises(DataError, match="cannot read the problems"):
            program.read_problems(tmp_path / "bad.jsonl")
    with pytest.raises(DataError, match="FileNotFoundError"):
        program.read_problems(tmp_path / "none.jsonl")


def test_no_code_runs_without_permission(program: Any, tmp_path: Path) -> None:
    words = ["--target", "none", "--problems", "none", "--json", str(tmp_path / "out.json")]
    with pytest.raises(ConfigError, match="--run-code"):
        program.main(words)


@pytest.mark.slow
def test_answers_are_finished_by_drafters_and_measured_in_stretches(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = save_pair(tmp_path)
    asked: list[tuple[str, str]] = []

    def is_right(problem: Any, answer: str) -> bool:
        asked.append((problem.name, answer))
        return "1" in problem.name

    monkeypatch.setattr(program, "is_right", is_right)
    methods = [f"own={pair / 'drafter'}", f"lm={pair / 'target'}"]
    words = [
        *("--target", str(pair / "target"), "--run-code", "--tokens", "12"),
        *("--problems", str(_problems(tmp_path, "f1", "f2"))),
        *(word for method in methods for word in ("--method", method)),
        *("--cut", "0", "--cut", "4", "--cut", "99", "--json", str(tmp_path / "out.json")),
    ]
    program.main([*words, "--minutes", "0"])
    assert not (tmp_path / "out.json").exists()
    program.main(words)
    document = json.loads((tmp_path / "out.json").read_text())
    answers = {name: len(ids) for name, ids in document["answers"].items()}
    for own in document["summary"].values():
        assert own["problems"] == 2
        assert own["pass_at_1"][0] == 0.5
    for key, own in document["records"].items():
        name = key.split(" Test/")[1].split()[0]
        whole = answers[f"Test/{name}"]
        assert own["num_tokens"] <= 12
        if own["method"] == "cut off":
            assert own["num_tokens"] == min(whole, own["cut"])
        elif own["cut"] == 99:
            assert own["num_tokens"] == whole
    by_problem: dict[str, list[int]] = {f"Test/{name}": [] for name in ("f1", "f2")}
    for key, own in document["records"].items():
        if own["method"] in ("target", methods[1]):  # the target itself finishes its answers
            by_problem[f"Test/{key.split(' Test/')[1].split()[0]}"].append(own["num_tokens"])
    assert all(len(set(lengths)) == 1 for lengths in by_problem.values())
    count = len(asked)
    program.main(words)
    assert len(asked) == count
    with pytest.raises(DataError, match=r"expected: tokens: 12, .*got: tokens: 13"):
        program.main([*words, "--tokens", "13"])
