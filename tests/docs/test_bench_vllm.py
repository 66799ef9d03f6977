"""The program that compares engines: order of the runs, figures, and what it asks a worker."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.programs import load_program

PROGRAMS = Path(__file__).parents[2] / "docs" / "programs"
WORKER = """
import json, sys
lines = (json.loads(line) for line in sys.stdin)
arguments = next(lines)
print(json.dumps({"vllm": "0", "threads": 2}), flush=True)
for request in lines:
    texts = [[1] * request["max_tokens"] for _ in request["prompts"]]
    print(json.dumps({"seconds": 2.0, "texts": texts, "drafts": 5, "accepted": 3}), flush=True)
"""


@pytest.fixture(scope="module")
def program() -> ModuleType:
    """The program as a module."""
    return load_program("bench_vllm")


class Fixed:
    """An engine that takes a fixed time per token."""

    def __init__(self, name: str, seconds: float, per_step: int, calls: list[str]) -> None:
        self.name, self.seconds, self.per_step, self.calls = name, seconds, per_step, calls

    def generate(self, prompts: list[list[int]]) -> dict[str, Any]:
        self.calls.append(self.name)
        num_tokens = 9 * len(prompts)
        return {
            "seconds": num_tokens * self.seconds,
            "texts": [[7] * 9 for _ in prompts],
            "steps": 8 * len(prompts) // self.per_step,
        }


def test_engines_alternate_and_are_compared_group_by_group(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "PAUSE", 0.0)
    calls: list[str] = []
    engines = [Fixed("vLLM", 0.5, 1, calls), Fixed("drafts", 0.25, 2, calls)]
    runs = list(program.measured(engines, [[1]] * 4, sizes=[1, 4], repeats=2))
    assert len(runs) == 2 * (2 * 4 + 2)
    measured = calls[4:]  # after the warm-up
    assert all({*measured[n : n + 2]} == {"vLLM", "drafts"} for n in range(0, len(measured), 2))
    unaided, drafts = program.figures(runs, [1, 4])
    assert (unaided["engine"], unaided["tau"], drafts["tau"]) == ("vLLM", 1.0, 2.0)
    assert drafts["at_4"]["tokens_per_second"] == pytest.approx(4.0)
    assert drafts["at_1"]["speed_up"] == pytest.approx([2.0, 2.0, 2.0])
    assert drafts["equal"] == 1.0
    row = program.table([drafts], [1, 4]).splitlines()[-1]
    assert row == "| drafts | 2.00 | 4.0 | 2.00 [2.00, 2.00] | 4.0 | 2.00 [2.00, 2.00] | 100% |"


@pytest.mark.parametrize(("method", "steps"), [("eagle3", 5), ("ngram", 2 * 7 - 3)])
def test_steps_of_vllm_are_those_with_and_without_drafts(
    program: ModuleType,
    method: str,
    steps: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    monkeypatch.setattr(program, "WORKER", worker)
    arguments = {"speculative_config": {"method": method}}
    limits = {"max_tokens": 8, "stop": [0]}
    python = Path(sys.executable)
    with program.VllmEngine("vLLM", python, arguments, limits, tmp_path / "log") as engine:
        assert engine.facts == {"vllm": "0", "threads": 2}
        answer = engine.generate([[1], [2]])
    assert answer == {"seconds": 2.0, "texts": [[1] * 8] * 2, "steps": steps}


def test_a_worker_that_ends_is_an_error_with_its_log(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text("raise ValueError('no such model')")
    monkeypatch.setattr(program, "WORKER", worker)
    with pytest.raises(SystemExit, match="ValueError: no such model\nerror: vLLM has ended"):
        program.VllmEngine("vLLM", Path(sys.executable), {}, {}, tmp_path / "log")


def test_the_stored_figures_are_those_of_the_stored_runs(program: ModuleType) -> None:
    results = PROGRAMS.parent / "benchmarks" / "results"
    for path in results.glob("vllm-*.json"):
        document = json.loads(path.read_text())
        page = (PROGRAMS.parent / "benchmarks" / "vllm.md").read_text()
        sizes = sorted({run["size"] for run in document["runs"]})
        for line in program.table(document["figures"], sizes).splitlines()[2:]:
            assert line in page
