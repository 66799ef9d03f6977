"""The program that compares drafting times measures drafters of the sizes of a study."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.adaptation import save_pair
from helpers.programs import load_program

from jakiro.drafter_settings import DrafterSettings
from jakiro.errors import ConfigError, DataError


def _words(folder: Path) -> list[str]:
    pair = save_pair(folder)
    (folder / "base.yaml").write_text(
        f"target: {{name_or_path: {pair / 'target'}}}\n"
        "data: {paths: [none.jsonl]}\n"
        "drafter: {experts: {num_experts: 1, intermediate_size: 64}}\n"
    )
    (folder / "sparse.yaml").write_text("drafter: {experts: {num_experts: 8, active_experts: 2}}")
    (folder / "prompts.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"def f{number}(a, b)"}) for number in range(2))
    )
    return [
        *("--base", str(folder / "base.yaml"), "--config", str(folder / "sparse.yaml")),
        *("--prompts", str(folder / "prompts.jsonl"), "--json", str(folder / "out.json")),
        *("--tokens", "4", "--repeats", "1", "--candidates", "8"),
    ]


def test_arms_are_as_large_as_the_base_and_widths_are_kept(tmp_path: Path) -> None:
    load_program("bench_drafting").main([*_words(tmp_path), "--width", "128"])
    document = json.loads((tmp_path / "out.json").read_text())
    results = {own["drafter"]: own for own in document["results"]}
    assert list(results) == ["base", "sparse", "base-128"]
    assert results["base"]["ratio"] == [1, 1, 1]
    assert (document["prompts"], document["repeats"]) == (2, 1)
    for own in results.values():
        assert own["milliseconds"] > 0
        assert own["ratio"][1] <= own["ratio"][0] <= own["ratio"][2]
    base, sparse, wide = results.values()
    assert base["parameters"] == base["active_parameters"]
    assert sparse["active_parameters"] == pytest.approx(base["parameters"], rel=0.02)
    assert sparse["parameters"] > 2 * sparse["active_parameters"]
    assert (sparse["width"], wide["width"]) == (32, 128)
    # Each of the 64 further units has three vectors as wide as the target.
    assert wide["parameters"] - base["parameters"] == 3 * 64 * 32


def test_an_arm_that_is_the_base_is_refused(tmp_path: Path) -> None:
    words = _words(tmp_path)
    (tmp_path / "sparse.yaml").write_text("drafter: {experts: {num_experts: 1}}")
    with pytest.raises(ConfigError, match="changes nothing"):
        load_program("bench_drafting").main(words)


def test_results_are_not_overwritten(tmp_path: Path) -> None:
    words = _words(tmp_path)
    (tmp_path / "out.json").write_text("{}")
    with pytest.raises(ConfigError, match="already exists"):
        load_program("bench_drafting").main(words)


class _Run:
    """A run whose drafting takes known seconds: 9 in the first step, then 1, 2 and 6."""

    def __init__(self) -> None:
        self.seconds = {"draft": 0.0, "verify": 0.0}

    def __iter__(self) -> Iterator[None]:
        for drafted in (0.0, 9.0, 1.0, 2.0, 6.0):
            self.seconds["draft"] += drafted
            self.seconds["verify"] += 100.0
            yield


class _ShortRun(_Run):
    def __iter__(self) -> Iterator[None]:
        self.seconds["draft"] += 9.0
        yield


class _Decoder:
    def __init__(self, name: str, calls: list[str], run: Callable[[], object] = _Run) -> None:
        self.name, self.calls, self.run = name, calls, run

    def start(self, prompts: list[list[int]], **options: object) -> object:
        self.calls.append(f"{self.name}{prompts[0][0]}")
        return self.run()


def test_drafting_is_measured_without_the_step_that_reads_the_prompt() -> None:
    calls: list[str] = []
    decoders = {name: _Decoder(name, calls) for name in "ab"}
    found = load_program("bench_drafting").measure(decoders, [[1], [2]], tokens=5, repeats=2)
    assert found == {"a": [2000.0, 2000.0], "b": [2000.0, 2000.0]}
    pairs = [calls[index : index + 2] for index in range(0, len(calls), 2)]
    assert [sorted(pair) for pair in pairs] == [["a1", "b1"], *[["a1", "b1"], ["a2", "b2"]] * 2]
    assert {"a", "b"} == {pair[0][0] for pair in pairs}  # neither is always the first


def test_ratios_are_those_of_the_same_prompt() -> None:
    settings = dict.fromkeys(["base", "wide"], DrafterSettings())
    found = {"base": [10.0, 20.0, 20.0], "wide": [15.0, 20.0, 20.0]}
    summary = load_program("bench_drafting").summary(found, settings, lambda _: (2, 1))
    base, wide = summary
    assert base["ratio"] == [1, 1, 1]
    assert wide["ratio"][:2] == [1, 1]
    assert wide["ratio"][2] == 1.5
    assert (wide["milliseconds"], wide["parameters"], wide["active_parameters"]) == (20, 2, 1)


def test_answers_that_are_too_short_are_refused() -> None:
    decoder = _Decoder("a", [], run=_ShortRun)
    with pytest.raises(DataError, match="raise --tokens"):
        load_program("bench_drafting").measure({"a": decoder}, [[1]], tokens=1, repeats=1)


@pytest.mark.parametrize(
    ("widths", "fault"), [(["0"], "intermediate_size"), (["128", "128"], "two drafters")]
)
def test_widths_that_cannot_be_used_are_refused(
    tmp_path: Path, widths: list[str], fault: str
) -> None:
    words = [word for width in widths for word in ("--width", width)]
    with pytest.raises(ConfigError, match=fault):
        load_program("bench_drafting").main([*_words(tmp_path), *words])
