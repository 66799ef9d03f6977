"""The program that measures text written alone goes on where it was stopped."""

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from helpers.adaptation import save_pair
from safetensors.torch import load_file, save_file

from jakiro.errors import DataError

PROGRAMS = Path(__file__).parents[2] / "docs" / "programs"


def _program(name: str) -> Any:
    spec = spec_from_file_location(name, PROGRAMS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_text_that_is_written_alone_is_measured_in_stretches(tmp_path: Path) -> None:
    pair, program = save_pair(tmp_path), _program("bench_offline")
    lines = [json.dumps({"prompt": f"def f{number}(a, b)"}) for number in range(2)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    methods = [f"own={pair / 'drafter'}", f"lm={pair / 'target'}", "lookup"]
    words = [
        *("--target", str(pair / "target"), "--prompts", str(tmp_path / "prompts.jsonl")),
        *(word for method in methods for word in ("--method", method)),
        *("--cut", "0", "--cut", "3", "--length", "16", "--json", str(tmp_path / "out.json")),
    ]
    program.main([*words, "--minutes", "0"])
    assert not (tmp_path / "out.json").exists()
    program.main(words)
    document = json.loads((tmp_path / "out.json").read_text())
    assert len(document["records"]) == 12
    itself = document["summary"][methods[1]]  # the target writes for itself
    assert itself["16"]["agreement"] == itself["16"]["unbroken"] == 1
    assert itself["16"]["nll"] == pytest.approx(itself["16"]["target_nll"], abs=1e-3)
    for method in methods:
        assert document["summary"][method]["continuations"] == 4
    program.main(words)
    assert json.loads((tmp_path / "out.json").read_text())["records"] == document["records"]
    with pytest.raises(DataError, match="expected: tokens: 19; got: tokens: 21"):
        program.main([*words, "--cut", "5"])
    weights = load_file(pair / "drafter" / "model.safetensors")
    name = next(iter(weights))
    save_file(weights | {name: weights[name] + 1}, pair / "drafter" / "model.safetensors")
    with pytest.raises(DataError, match=f"expected: drafter {methods[0]}: "):
        program.main(words)


@pytest.mark.slow
def test_drafting_ahead_is_measured_beside_its_expectation(tmp_path: Path) -> None:
    pair, program = save_pair(tmp_path), _program("bench_ahead")
    lines = [json.dumps({"prompt": f"def f{number}(a, b)"}) for number in range(2)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    program.main(
        [
            *("--target", str(pair / "target"), "--draft-model", str(pair / "target")),
            *("--prompts", str(tmp_path / "prompts.jsonl"), "--tokens", "12"),
            *("--json", str(tmp_path / "out.json")),
        ]
    )
    document = json.loads((tmp_path / "out.json").read_text())
    assert {"target", "drafter small LM", "prompt 1"} <= document["parts"].keys()
    results = document["results"]
    assert [own["temperature"] for own in results] == [0.0, 1.0]
    for own in results:
        assert own["equal_texts"] == own["prompts"] == 2
        assert 0 <= own["right_guesses"] <= 1
        assert own["gain"][1] <= own["gain"][0] <= own["gain"][2]
        assert own["expected_gain"] > 0
