"""The program that stores the results of the screening and writes their tables."""

from pathlib import Path

import pytest
from helpers.programs import load_program
from helpers.studies import made_up_arm, made_up_documents

from inference.benchmark.document import read_document
from training.studies.ablation.analysis import analyse
from training.studies.ablation.evaluation import MeasurementInputs
from training.studies.ablation.runs import MeasuredRun

NAMES = ("base", "memory-kv", "experts-2")


def _study(folder: Path, *names: str) -> None:
    """Write what a study of these arms leaves behind, with texts in its documents."""
    documents = made_up_documents(
        dict.fromkeys(names, 0.0), temperatures=(0.0, 1.0), seeds=1, prompts=4
    )
    results = analyse(documents, [made_up_arm(name) for name in names])
    (folder / "arms").mkdir(parents=True, exist_ok=True)
    (folder / "measurements").mkdir(exist_ok=True)
    record = {
        "training": {"step": 150, "tokens": 271_900},
        "evaluation": {"experts": {"top_overlap": None if names[-1] == "base" else 0.25}},
        "provenance": {"git": {"sha": "0123456789abcdef", "is_dirty": False}},
    }
    for name in names:
        (folder / "arms" / f"{name}.json").write_text(results.of_arm(name).model_dump_json())
        run = MeasuredRun(weights="any", facts={}, record=record)
        inputs = MeasurementInputs(key="any", runs={name: run})
        path = folder / "measurements" / f"{name}-0.json"
        path.write_text(documents[0].model_dump_json())
        path.with_suffix(".inputs.json").write_text(inputs.model_dump_json())


def test_results_are_stored_without_texts_and_shown_with_those_of_earlier_studies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screening = load_program("screening")
    page, stored = tmp_path / "page.md", tmp_path / "results"
    page.write_text(
        "<!-- rates -->\n<!-- end of rates -->\nbefore\n"
        "<!-- results -->\nold\n<!-- end of results -->\nafter\n"
    )
    monkeypatch.setattr(screening, "PAGE", page)
    monkeypatch.setattr(screening, "RESULTS", stored)
    monkeypatch.setattr(screening, "RATES", stored / "rates.json")
    stored.mkdir()

    _study(tmp_path / "first" / "humaneval", *NAMES[:2])
    screening.store(tmp_path / "first")
    _study(tmp_path / "second" / "humaneval", "base", NAMES[2])
    screening.store(tmp_path / "second")
    text = screening.page()
    assert "before\n<!-- results -->\n" in text
    assert text.endswith("\n<!-- end of results -->\nafter\n")
    assert "old" not in text
    (training,) = [line for line in text.splitlines() if line.startswith("| `memory-kv` | 1.23M")]
    assert "| 150 | 272k | 0.600 | 0.25 | 01234567 |" in training
    shown = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
    assert shown == ["base", "experts-2", "memory-kv"] * 2

    document = read_document(stored / "humaneval" / "measurements" / "memory-kv-0.json")
    assert not document.questions
    assert not document.trees
    assert {sample.answer for method in document.methods for sample in method.samples} == {None}
    figures = document.figures("memory-kv", 1.0)
    assert f"| {figures.tau:.2f} [{figures.tau_low:.2f}, {figures.tau_high:.2f}] |" in text
    before = read_document(tmp_path / "first" / "humaneval" / "measurements" / "memory-kv-0.json")
    assert [method.samples for method in document.methods] == [
        tuple(sample.model_copy(update={"answer": None}) for sample in method.samples)
        for method in before.methods
    ]
