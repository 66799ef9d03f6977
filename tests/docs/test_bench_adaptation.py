"""The program that measures adaptation goes on where it was stopped, and checks all texts."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.adaptation import save_pair
from helpers.programs import load_program


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stream_is_measured_in_stretches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = save_pair(tmp_path)
    for name, text in (("code", "def f"), ("articles", "a text")):
        lines = [json.dumps({"prompt": f"{text} {number}"}) for number in range(12)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    module: Any = load_program("bench_adaptation")
    words = {
        "--target": pair / "target",
        "--drafter": pair / "drafter",
        "--code": tmp_path / "code.jsonl",
        "--articles": tmp_path / "articles.jsonl",
        "--folder": tmp_path / "work",
        "--json": tmp_path / "result.json",
        "--tokens": 12,
        "--every": 9,
    }
    given = [str(word) for pair in words.items() for word in pair]
    codes = []
    for minutes in ("0.001", "0.02", "9"):
        monkeypatch.setattr(sys, "argv", ["bench", *given, "--minutes", minutes])
        codes.append(module.main())
    assert codes[-1] == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["requests"]) == result["num_exact"] == 18
    assert [stage["domain"] for stage in result["stages"]] == ["code", "articles", "code"]
    assert [lesson["num_requests"] for lesson in result["lessons"]] == [9]
    assert "token_ids" not in (tmp_path / "result.json").read_text()
