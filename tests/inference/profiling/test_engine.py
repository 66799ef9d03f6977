"""The profiling programs run to their end and print the documented figures."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.commands import exit_code
from helpers.models import tiny_drafter, tiny_llama
from helpers.tokenizers import tiny_tokenizer

from inference.benchmark.stats import interval, median_interval
from inference.profiling.forwards import Recorder, Stopwatch, watched
from inference.profiling.oracle import OracleDrafter
from inference.profiling.subject import start
from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter, chain_step
from jakiro.target.cache import TargetState

HEADLINES = {
    "plain_vs_transformers": 1.05,
    "plain_compiled_vs_transformers": 1.3,
    "own_overhead_share": 0.1,
    "context_growth": 0.1,
    "batch8_scaling": None,
    "oracle_efficiency": 0.9,
}


@pytest.fixture
def target_folder(tmp_path: Path) -> Path:
    """A tiny target with its tokenizer."""
    folder = tmp_path / "target"
    tiny_llama(vocab=300).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def _document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for one in value.values():
            yield from _numbers(one)
    elif isinstance(value, float):
        yield value


def test_quick_run_of_the_engine_measures_everything(
    target_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("profile", "engine", "--target", str(target_folder), "--quick") == 0
    document = _document(capsys)
    for name, goal in HEADLINES.items():
        figure = document[name]
        assert figure["target"] == goal
        # A quick run compiles nothing.
        is_missing = name == "plain_compiled_vs_transformers"
        assert (figure["value"] is None) == is_missing
        if not is_missing:
            assert figure["low"] <= figure["value"] <= figure["high"]
    assert all(map(math.isfinite, _numbers(document)))
    assert document["environment"]["bytes_per_cached_token"] == 3 * 2 * 2 * 8 * 4
    assert document["details"]["oracle_efficiency"]["tau"] == 4


@pytest.mark.parametrize(("num_right", "num_nodes"), [(3, 8), (1, 2), (2, 7)])
def test_an_oracle_has_as_many_accepted_drafts_as_requested(num_right: int, num_nodes: int) -> None:
    target = TargetAdapter(tiny_llama())
    prompts = [[1, 2, 3], [4, 5]]
    known = [start(target, None, [ids], 40).finish().token_ids for ids in prompts]
    oracle = OracleDrafter(known, 61, target.device, num_right, num_nodes)
    count = 5 * (num_right + 1) + 1
    run = start(target, oracle, prompts, count).finish()
    assert run.stats.tau == num_right + 1
    for one, ids, all_ids in zip(run.sequences, prompts, known, strict=True):
        assert one.token_ids == all_ids[: len(ids) + count]


def test_nested_forwards_are_watched_once_and_can_be_replayed() -> None:
    target = TargetAdapter(tiny_llama())
    drafter = tiny_drafter(target)
    cache = target.new_cache(1, 4)
    recorder, stopwatch = Recorder(), Stopwatch()
    for around in (recorder, stopwatch):
        with watched(target, drafter, around), torch.inference_mode():
            output = target.forward(chain_step(torch.tensor([[1, 2]]), 0), cache)
            logits = target.logits(output.features)
            _encode(drafter, drafter.state_sources.read(cache, torch.tensor([[0, 1]])))
    assert set(stopwatch.seconds) == {"target", "logits", "memory"}
    assert len(recorder.calls) == 3
    with torch.inference_mode():
        assert torch.equal(recorder.calls[1](), logits)
    assert "logits" not in vars(target)


def _encode(drafter: JakiroDrafter, state: TargetState) -> None:
    drafter.encode_memory(state, torch.tensor([[0, 1]]))


def test_an_interval_holds_its_value_and_narrows_with_more_items() -> None:
    few = median_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert few.low <= few.value == 3.0 <= few.high
    many = interval([1.0, 2.0, 3.0, 4.0, 5.0] * 40, lambda values: sum(values) / len(values))
    assert many.high - many.low < few.high - few.low
