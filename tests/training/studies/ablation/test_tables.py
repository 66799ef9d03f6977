"""Tables of the results of a study."""

import csv
import math
from dataclasses import replace
from io import StringIO

import pytest
from helpers.studies import made_up_arm, made_up_documents
from rich.console import Console

from training.studies.ablation.analysis import analyse
from training.studies.ablation.results import ArmSweep, StudyResults, SweepResults
from training.studies.ablation.tables import (
    HEADINGS,
    in_words,
    to_csv,
    to_markdown,
    to_terminal,
    with_interval,
)
from training.studies.ablation.trees import parse_trees

NAMES = (
    "base",
    "with[brackets]",
    "a|bar",
    "contrast-loss-off",
    "a-name-of-many-words-that-is-long",
)


@pytest.fixture(scope="module")
def results() -> StudyResults:
    arms = [made_up_arm(name) for name in NAMES]
    effects = dict.fromkeys(NAMES, 0.0) | {"contrast-loss-off": math.log(0.7)}
    return analyse(made_up_documents(effects, temperatures=(0.0, 1.0), number=1), arms)


def shown(results: StudyResults, width: int) -> str:
    console = Console(width=width, record=True, file=StringIO())
    console.print(to_terminal(results))
    return console.export_text()


def test_the_terminal_shows_every_arm_at_every_temperature(results: StudyResults) -> None:
    text = shown(results, width=130)
    for row in results.rows:
        (line,) = [
            line
            for line in text.splitlines()
            if line.strip().startswith(row.arm) and f" {row.temperature:g} {row.tau:.2f}" in line
        ]
        if row.arm != "base":
            assert with_interval(row.tau_ratio) in line
            assert row.verdict in line
    assert "1.23M" in text
    assert "verdicts on tau, about" in " ".join(text.split())


def test_the_results_of_an_arm_in_words(results: StudyResults) -> None:
    base, arm = results.at(1.0)[:2]
    assert in_words(base.model_copy(update={"tau": 2.0})).startswith("base at T = 1: tau 2.00")
    assert "the base's" not in in_words(base)
    known = arm.model_copy(update={"trees": "60", "validation_agreement": 0.3})
    assert in_words(known) == (
        f"with[brackets] at T = 1, trees 60: tau {arm.tau:.2f}, {with_interval(arm.tau_ratio)} "
        "times the base's; held-out agreement 30.0%"
    )


def test_a_narrow_terminal_loses_no_figure(results: StudyResults) -> None:
    text = shown(results, width=80)
    assert all(len(line) <= 80 for line in text.splitlines())
    for row in results.rows:
        if row.arm == "base":
            continue
        assert f"{row.tau_ratio.low:.3f}," in text
        assert f"{row.tau_ratio.high:.3f}]" in text
    assert "not resolved" in text


def test_markdown_has_one_row_for_each_arm_and_temperature(results: StudyResults) -> None:
    lines = [line for line in to_markdown(results).splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(results.rows)
    cells = [line.replace("\\|", "").count("|") for line in lines]
    assert set(cells) == {len(HEADINGS) + 1}
    assert results.note in to_markdown(results)


def test_a_sweep_is_reported_in_words_and_in_a_table_of_its_own(results: StudyResults) -> None:
    arm = ArmSweep(arm="a|bar", tau=((1.5, 1.75), (1.25, 1.2)), score=(1.37, 1.45), chosen=0.02)
    sweep = SweepResults(
        key="optimizer.learning_rate",
        values=(0.01, 0.02),
        temperatures=(0.0, 1.0),
        seed=0,
        prompts=7,
        arms=(arm,),
    )
    swept = results.model_copy(update={"sweep": sweep})
    text = to_markdown(swept)
    assert text.startswith(to_markdown(results).partition(results.note)[0])
    assert "| arm | T | 0.01 | 0.02 |" in text
    assert r"| a\|bar | 1 | 1.25 | **1.20** |" in text
    sentence = "optimizer.learning_rate, selected for each arm on 7 dev prompts: a|bar 0.02."
    assert sentence in text
    assert sentence in " ".join(shown(swept, width=130).split())


def test_several_kinds_of_trees_have_a_column_of_their_own() -> None:
    trees = parse_trees(["candidates=8", "tree=deterministic,candidates=60"], 8)
    arms = [made_up_arm(name) for name in ("base", "other")]
    truth = {kind.method(arm.name): 0.0 for arm in arms for kind in trees}
    results = analyse(made_up_documents(truth), arms, trees)
    lines = [line for line in to_markdown(results).splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    column = cells[0].index("trees")
    assert [row[column] for row in cells[2:]] == ["8", "8", "deterministic-60", "deterministic-60"]
    assert {len(row) for row in cells} == {len(HEADINGS) + 3}
    assert "deterministic-60" in shown(results, width=130)
    records = list(csv.DictReader(to_csv(results).splitlines()))
    assert [record["trees"] for record in records] == [
        "8",
        "8",
        "deterministic-60",
        "deterministic-60",
    ]


def test_experts_have_a_table_where_they_were_measured(results: StudyResults) -> None:
    assert not results.experts
    assert "overlap" not in to_markdown(results)
    entropies = {
        "router_entropy": 0.5,
        "load_entropy": 0.6,
        "mean_gate": [0.5, 0.5],
        "positions": 9,
    }
    measured = ({"top_overlap": 0.25, **entropies}, {"top_overlap": 0.75, **entropies})
    arms = [
        replace(made_up_arm("base"), experts=measured),
        replace(made_up_arm("sum"), experts=({"top_overlap": None, **entropies},)),
        made_up_arm("older"),
    ]
    effects = {arm.name: 0.0 for arm in arms}
    found = analyse(made_up_documents(effects), arms)
    assert [experts.arm for experts in found.experts] == ["base", "sum"]
    assert found.experts[0].by_seed == ((0.25, 0.5, 0.6), (0.75, 0.5, 0.6))
    text = to_markdown(found)
    assert "| base | 0.500 | 0.500 | 0.600 |" in text
    assert "| sum | - | 0.500 | 0.600 |" in text
    assert StudyResults.model_validate_json(found.model_dump_json()) == found


def test_csv_keeps_all_digits(results: StudyResults) -> None:
    records = list(csv.DictReader(to_csv(results).splitlines()))
    assert [record["arm"] for record in records] == 2 * list(NAMES)
    for record, row in zip(records, results.rows, strict=True):
        assert float(record["temperature"]) == row.temperature
        assert float(record["tau_ratio_low"]) == row.tau_ratio.low
        assert float(record["speedup"]) == row.speedup.value
        assert float(record["tau_ratio_seed_2"]) == row.tau_ratio.by_seed[2]
        assert int(record["training_tokens_seed_0"]) == row.training_tokens[0]
        assert record["verdict"] == row.verdict
