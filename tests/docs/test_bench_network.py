"""The program that measures texts over simulated networks goes on where it was stopped."""

import json
import sys
from argparse import Namespace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from helpers.adaptation import save_pair
from safetensors.torch import load_file, save_file

from jakiro.errors import DataError

PROGRAM = Path(__file__).parents[2] / "docs" / "programs" / "bench_network.py"


@pytest.fixture
def module() -> Any:
    spec = spec_from_file_location("bench_network", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    loaded: Any = module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


@pytest.mark.timeout(20)
def test_a_server_that_does_not_start_is_an_error(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        def __init__(self, *_: Any) -> None:
            pass

        async def run_until_drained(self, _: Any) -> int:
            raise OSError("no port is free")

        def drain(self) -> None:
            pass

    monkeypatch.setattr(module, "Server", Failing)
    monkeypatch.setattr(module, "SpeculativeDecoder", lambda *_, **__: None)
    bench = object.__new__(module.Bench)
    bench.model = bench.tokenizer = None
    bench.arguments = Namespace(capacity=64)
    with pytest.raises(OSError, match="no port is free"), bench._server(None):
        pass


def test_a_stream_that_never_ends_has_no_text_and_no_time(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any) -> None:
        raise module.httpx2.ReadError("connection lost")

    monkeypatch.setattr(module, "_read_stream", lost)
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    bench = object.__new__(module.Bench)
    bench.arguments = Namespace(tokens=8)
    found = bench._streamed("http://server", module.Method("stream", None), 0.0, [1, 2])
    assert found["text"] is None
    assert found["calls"] == module.MOST_ATTEMPTS
    lost_row = {**found, "is_complete": False, "is_exact": False}
    whole = {**found, "is_complete": True, "is_exact": True, "seconds": 2.0, "first": 1.0}
    places = [("LAN", whole), ("disconnections", lost_row)]
    rows = [
        {"method": "stream", "profile": name, "temperature": 0, "tokens": 5, "up": 10, "down": 20}
        | row
        for name, row in places
    ]
    line = module.table(module.figures(rows), 0).splitlines()[-1]
    assert line.endswith("| 250 | none | 1 of 1 |")
    line = module.table(module.figures(rows[1:]), 0).splitlines()[-1]
    assert line == "| stream |  |  |  |  |  | none | 0 of 0 |"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_texts_are_measured_in_stretches_and_compared(
    module: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pair = save_pair(tmp_path)
    lines = [json.dumps({"prompt": f"def f {number}"}) for number in range(2)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    given = ["--target", pair / "target", "--trained", f"own={pair / 'drafter'}"]
    given += ["--lm", pair / "target", "--prompts", tmp_path / "prompts.jsonl", "--tokens", 6]
    given += ["--capacity", 64, "--profiles", "LAN", "disconnections", "--num-prompts", 2]
    words = ["bench", *map(str, given), "--json", str(tmp_path / "result.json")]
    codes = []
    for minutes in ("0.001", "0.03", "9"):
        monkeypatch.setattr(sys, "argv", [*words, "--minutes", minutes])
        codes.append(module.main())
    assert codes[-1] == 0
    result = json.loads((tmp_path / "result.json").read_text())
    kinds = {name: own["kind"] for name, own in result["drafters"].items()}
    assert kinds["own"] == "TrainedDrafter"
    assert result["drafters"]["own"]["encoder"]
    assert result["drafters"]["small LM"]["fingerprint"]
    keys = [tuple(row[name] for name in module.KEY) for row in result["rows"]]
    assert len(keys) == len(set(keys)) == 2 * 2 * (2 * 5 + 1)
    assert all(row["is_exact"] for row in result["rows"])
    by_method = {own["method"]: own for own in result["figures"] if own["temperature"] == 0}
    exact, int8 = (by_method[f"device drafts, own, {kind}"] for kind in ("exact", "int8"))
    assert exact["down_per_token"] > int8["down_per_token"]
    assert by_method["stream"]["calls_per_token"] < exact["calls_per_token"]
    assert capsys.readouterr().out.count("| T = 0 | tau |") == 3
    weights = load_file(pair / "drafter" / "model.safetensors")
    name = next(iter(weights))
    save_file(weights | {name: weights[name] + 1}, pair / "drafter" / "model.safetensors")
    with pytest.raises(DataError, match="expected: drafter own: "):
        module.main()
    assert json.loads((tmp_path / "result.json").read_text()) == result
