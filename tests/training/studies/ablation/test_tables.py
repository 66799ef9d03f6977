"""The table of the results of a study."""

import math
from dataclasses import replace

from helpers.studies import made_up_arm, made_up_documents

from training.studies.ablation.analysis import analyse
from training.studies.ablation.arms import Arm
from training.studies.ablation.results import StudyResults
from training.studies.ablation.tables import to_markdown


def test_the_table_has_one_row_for_each_arm_and_temperature() -> None:
    effects = {"base": 0.0, "a": 0.0, "contrast-loss-off": math.log(0.7)}
    documents = made_up_documents(effects, temperatures=(0.0, 1.0), number=1)
    results = analyse(documents, [made_up_arm(name) for name in effects])
    text = to_markdown(results)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(results.rows)
    assert {line.count("|") for line in lines} == {9}
    for line, row in zip(lines[2:], results.rows, strict=True):
        assert line.startswith(f"| {row.arm} | 1.23M |")
        assert row.arm == "base" or f"{row.tau_ratio.shown(3)} |" in line
    assert results.note in text
    assert "overlap" not in text


def test_experts_have_a_table_where_they_were_measured() -> None:
    entropies = {"router_entropy": 0.5, "load_entropy": 0.6, "mean_gate": [0.5, 0.5]}

    def with_experts(name: str, *overlaps: float | None) -> Arm:
        records = [
            {"training": {"tokens": 1}, "evaluation": {"experts": {"top_overlap": x, **entropies}}}
            for x in overlaps
        ]
        return replace(made_up_arm(name), records=tuple(records))

    arms = [with_experts("base", 0.25, 0.75), with_experts("sum", None), made_up_arm("older")]
    results = analyse(made_up_documents({arm.name: 0.0 for arm in arms}), arms)
    assert [experts.arm for experts in results.experts] == ["base", "sum"]
    assert results.experts[0].by_seed == ((0.25, 0.5, 0.6), (0.75, 0.5, 0.6))
    text = to_markdown(results)
    assert "| base | 0.500 | 0.500 | 0.600 |" in text
    assert "| sum | - | 0.500 | 0.600 |" in text
    assert StudyResults.model_validate_json(results.model_dump_json()) == results
