"""The program that stores the results of the screening and writes their tables."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.comparisons import make_environment
from helpers.models import tiny_drafter, tiny_llama
from helpers.programs import load_program
from helpers.studies import made_up_arm, made_up_documents
from helpers.training import tiny_run

from inference.benchmark.document import read_document
from inference.benchmark.replay.document import (
    ReplayDocument,
    ReplayedCategory,
    ReplayedPrompt,
    ReplayRow,
    ReplaySettings,
)
from inference.benchmark.stats import Ratio
from jakiro.target.adapter import TargetAdapter
from training.config import TrainSettings
from training.studies.ablation.analysis import analyse
from training.studies.ablation.evaluation import MeasurementInputs
from training.studies.ablation.results import StudyResults
from training.studies.ablation.runs import MeasuredRun
from training.studies.ablation.tables import with_interval

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
        "evaluation": {"experts": {"top_overlap": 0.25, "router_entropy": 0.69}},
        "provenance": {"git": {"sha": "0123456789abcdef", "is_dirty": False}},
    }
    for name in names:
        (folder / "arms" / f"{name}.json").write_text(results.of_arm(name).model_dump_json())
        run = MeasuredRun(weights="any", facts={}, record=record)
        inputs = MeasurementInputs(key="any", runs={name: run})
        path = folder / "measurements" / f"{name}-0.json"
        path.write_text(documents[0].model_dump_json())
        path.with_suffix(".inputs.json").write_text(inputs.model_dump_json())


def _shown(text: str) -> list[str]:
    """Return the arms that the tables of a page show."""
    return [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]


def test_results_are_stored_without_texts_and_shown_with_those_of_earlier_studies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screening = load_program("screening")
    page, stored = tmp_path / "page.md", tmp_path / "results"
    page.write_text(
        "<!-- rates -->\n<!-- end of rates -->\nbefore\n"
        "<!-- results -->\nold\n<!-- end of results -->\nafter\n"
        "<!-- square -->\n<!-- end of square -->\n"
        "<!-- trainings -->\n<!-- end of trainings -->\n"
        "<!-- replays -->\n<!-- end of replays -->\n"
        "<!-- scaling -->\n<!-- end of scaling -->\n"
        "<!-- long-prompts -->\n<!-- end of long-prompts -->\n"
        "<!-- equal-time -->\n<!-- end of equal-time -->\n<!-- fusion -->\n<!-- end of fusion -->\n"
        "<!-- times -->\n<!-- end of times -->\n"
        "<!-- speeds -->\n<!-- end of speeds -->\n"
    )
    monkeypatch.setattr(screening, "PAGE", page)
    monkeypatch.setattr(screening, "RESULTS", stored)
    monkeypatch.setattr(screening, "RATES", stored / "rates.json")
    monkeypatch.setattr(screening, "REPLAYS", stored / "replay")
    monkeypatch.setattr(screening, "TRAININGS", stored / "long-trainings.json")
    stored.mkdir()

    _study(tmp_path / "first" / "humaneval", *NAMES[:2])
    screening.store(tmp_path / "first")
    _study(tmp_path / "second" / "humaneval", "base", NAMES[2])
    screening.store(tmp_path / "second")
    text = screening.page()
    assert "before\n<!-- results -->\n" in text
    assert "\n<!-- end of results -->\nafter\n" in text
    assert "old" not in text
    (training,) = [line for line in text.splitlines() if line.startswith("| `memory-kv` | 1.23M")]
    assert "| 150 | 272k | 0.600 | 0.25 | 0.69 | 01234567 |" in training
    assert _shown(text) == ["base", "experts-2", "memory-kv"] * 2
    arm = StudyResults.model_validate_json((stored / "humaneval/arms/memory-kv.json").read_text())
    (taus,) = [line for line in text.splitlines() if line.startswith("| `memory-kv` |")][1:]
    for row in arm.rows:
        assert f" {with_interval(row.tau_ratio)} " in taus.replace("**", " ")
    assert "Not all four arms are measured yet." in text

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


@pytest.fixture
def screening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the program, with pages that have no tables yet and no stored results."""
    screening = load_program("screening")
    for name, groups in {
        "PAGE": (
            *("rates", "results", "square", "trainings", "replays", "scaling"),
            *("long-prompts", "equal-time", "fusion", "times", "speeds"),
        ),
        "PUBLISHED_PAGE": ("results", "curves", "speeds", "replays", "long-replays", "scaling"),
    }.items():
        path = tmp_path / f"{name}.md"
        path.write_text("".join(f"<!-- {group} -->\n<!-- end of {group} -->\n" for group in groups))
        monkeypatch.setattr(screening, name, path)
    folder = tmp_path / "results" / "screening"
    folder.mkdir(parents=True)
    monkeypatch.setattr(screening, "RESULTS", folder)
    monkeypatch.setattr(screening, "RATES", folder / "rates.json")
    monkeypatch.setattr(screening, "CURVES", folder / "curves.json")
    monkeypatch.setattr(screening, "TRAININGS", folder.parent / "long-trainings.json")
    monkeypatch.setattr(screening, "REPLAYS", folder.parent / "replay")
    return screening


def test_published_drafters_have_a_page_of_their_own(screening: ModuleType, tmp_path: Path) -> None:
    _study(tmp_path / "study" / "humaneval", "base", "gumiho", "fusion")
    screening.store(tmp_path / "study")
    names = ["base", "base-auto", "gumiho", "gumiho-auto", "alone"]
    document = made_up_documents(dict.fromkeys(names, 0.0), seeds=1, prompts=4)[0]
    (screening.RESULTS.parent / "published-smollm2-humaneval-t0.json").write_text(
        document.model_dump_json()
    )
    assert _shown(screening.page()) == ["base", "fusion"] * 2
    text = screening.published_page()
    assert _shown(text) == [*["base", "gumiho"] * 2, "autoregressive", "base", "gumiho", "alone"]
    chosen = document.figures("gumiho-auto", 0.0).tokens_per_second
    assert f"| {chosen:.1f} |" in text


def test_the_agreement_of_each_fifth_of_a_training_is_weighted_by_tokens(
    screening: ModuleType, tmp_path: Path
) -> None:
    for name in ("base", "moa", "fusion"):
        run = tmp_path / f"study-of-{name}" / "runs" / name / "seed-0"
        run.mkdir(parents=True)
        steps = [
            (10, 5, 0.0),
            (20, 15, 0.2),
            (30, 20, 0.3),
            (40, 20, 0.4),
            (50, 10, 0.5),
            (60, 30, 1),
        ]
        records: list[dict[str, Any]] = [
            {"step": step, "tokens": tokens, "levels": [{"agreement": agreement}, {"agreement": 0}]}
            for step, tokens, agreement in steps
        ]
        records.append({"step": 60, "evaluation": {}})
        text = "".join(json.dumps(record) + "\n" for record in records)
        (run / "metrics.jsonl").write_text(text)
        screening.store_curves(tmp_path / f"study-of-{name}")  # keeps earlier curves
    (tmp_path / "study-of-moa/runs/moa/seed-0/metrics.jsonl").write_text("")  # trained again
    screening.store_curves(tmp_path / "study-of-moa")
    text = screening.published_page()
    assert _shown(text) == ["base", "moa"]
    assert text.count("| 0.15 | 0.30 | 0.40 | 0.50 | 1.00 |") == 2


def test_a_training_that_has_just_begun_has_parts_without_a_curve(screening: ModuleType) -> None:
    screening.CURVES.write_text(json.dumps({"base": [(10, 0.25)], "moa": [(10, 0.5), (10, 1)]}))
    lines = screening.published_page().splitlines()
    assert "| `base` | - | - | 0.25 | - | - |" in lines
    assert "| `moa` | - | 0.50 | - | 1.00 | - |" in lines


def test_a_target_in_fp32_has_tables_of_its_own(screening: ModuleType, tmp_path: Path) -> None:
    _study(tmp_path / "study" / "humaneval", "base", "eagle2")
    _study(tmp_path / "study" / "humaneval-fp32", "base", "moa")
    screening.store(tmp_path / "study")
    bf16, fp32 = screening.published_page().split("Trainings with the target in fp32:")
    assert _shown(bf16) == ["base", "eagle2"] * 2
    assert _shown(fp32) == ["base", "moa"] * 2
    assert _shown(screening.page()) == []
    # Ratios refer to EAGLE-2 if it was measured with the same target, otherwise to the base.
    for table, reference in ((bf16, "`eagle2`"), (fp32, "`base`")):
        (ratios,) = [line for line in table.splitlines() if line.startswith(f"| {reference}")][1:]
        assert ratios.count("| 1 |") == 2
        assert table.count("| 1 |") == 2


def _replay(path: Path, seed: int = 0, **steps: Sequence[int]) -> None:
    """Store a replay in which each drafter needs these numbers of steps for 60 tokens per prompt.

    Each interval is 0.1 on both sides of a figure.

    Args:
        path: file to write.
        seed: seed of the trainings.
        **steps: steps for each prompt, by name of the drafter.
    """
    first = next(iter(steps.values()))
    rows = []
    for name, own in steps.items():
        tau, ratio = 60 * len(own) / sum(own), sum(first) / sum(own)
        counts = [
            ReplayedPrompt(prompt=f"p{number}", category="any", decoded=60, steps=count)
            for number, count in enumerate(own)
        ]
        rows.append(
            ReplayRow(
                drafter=name,
                temperature=0.0,
                trees="candidates=60",
                tau=Ratio(value=tau, low=tau - 0.1, high=tau + 0.1, by_seed=(tau,)),
                ratio=Ratio(value=ratio, low=ratio - 0.1, high=ratio + 0.1, by_seed=(ratio,)),
                conditional_acceptance_rate=(0.7, ratio / 2),
                counts=(tuple(counts),),
            )
        )
    document = ReplayDocument(
        environment=make_environment(),
        settings=ReplaySettings(
            drafters=tuple(f"{name}={name}/seed-{seed}/drafter" for name in steps),
            prompts="p.jsonl",
        ),
        prompts=len(first),
        tokens={0.0: 1234},
        rows=tuple(rows),
    )
    path.parent.mkdir(exist_ok=True)
    path.write_text(document.model_dump_json())


def test_replays_are_shown_on_the_page_of_their_study(screening: ModuleType) -> None:
    _replay(screening.REPLAYS / "published-mt_bench.json", base=[30] * 12, moa=[24] * 12)
    lines = screening.published_page().splitlines()
    assert "| MT-bench (12) | 0 | `base` | 1 | 2.00 [1.90, 2.10] | 1 | .70 .50 |" in lines
    moa = "| MT-bench (12) | 0 | `moa` | 1 | 2.50 [2.40, 2.60] | **1.250 [1.150, 1.350]** |"
    assert f"{moa} .70 .62 |" in lines
    assert screening.page().count("No text is replayed yet.") == 5


def test_replays_of_further_trainings_are_pooled_with_the_first_ones(
    screening: ModuleType,
) -> None:
    _replay(screening.REPLAYS / "long-mt_bench.json", base=[30, 34], moa=[24, 26], old=[40, 40])
    _replay(
        screening.REPLAYS / "long-seed1-mt_bench.json", 1, base=[20, 22], moa=[30, 31], new=[9, 9]
    )
    lines = [line for line in screening.page().splitlines() if line.startswith("| MT-bench (2)")]
    assert [line.split("`")[1] for line in lines] == ["base", "moa", "old", "new"]
    base, moa, old, new = (line.split(" | ") for line in lines)
    assert base[3:6:2] == ["2", "1"]
    assert base[4].startswith("2.26 ")  # 240 tokens in 106 steps
    assert moa[5].startswith("0.955 ")  # 106 / 111
    assert moa[6] == ".70 .49 |"  # the means of both trainings
    assert old[3:6:2] == ["1", "**0.800 [0.700, 0.900]**"]
    assert new[3:6:2] == ["1", "**2.333 [2.233, 2.433]**"]  # compared with the base of its seed


def test_a_base_that_is_replayed_twice_is_one_training(screening: ModuleType) -> None:
    _replay(screening.REPLAYS / "long-seed1-mt_bench.json", base=[20, 22], old=[40, 40])
    path = screening.REPLAYS / "long-seed1-memory-mt_bench.json"
    _replay(path, base=[20, 22], memory=[21, 21])
    lines = [line for line in screening.page().splitlines() if line.startswith("| MT-bench (2)")]
    assert [line.split("`")[1] for line in lines] == ["base", "old", "memory"]
    assert lines[0].split(" | ")[3] == "1"
    assert lines[2].split(" | ")[5] == "1.000 [0.900, 1.100]"
    _replay(path, base=[20, 21], memory=[21, 21])
    with pytest.raises(AssertionError, match="base was replayed on other texts"):
        screening.page()


def test_two_drafters_are_compared_with_each_other(screening: ModuleType) -> None:
    sparse, wide = {"sparse-16-2": [30, 30, 60]}, {"base-6144": [24, 24, 48]}
    _replay(screening.REPLAYS / "long-seed1-mt_bench.json", 1, base=[40, 40, 40], **sparse)
    _replay(screening.REPLAYS / "long-seed1-wide-mt_bench.json", 1, base=[40, 40, 40], **wide)
    other = {"sparse-16-2": [20, 20, 20]}  # of another seed
    _replay(screening.REPLAYS / "long-seed0-sparse-mt_bench.json", 0, base=[41, 41, 41], **other)
    lines = screening.page().splitlines()
    row = "| MT-bench (3) | 0 | 1.50 [1.40, 1.60] | 1.88 [1.77, 1.98] | **0.800 [0.800, 0.800]** |"
    assert row in lines
    assert lines[lines.index(row) - 2].startswith("| prompts | T | tau, `sparse-16-2` | tau, `base")


def test_drafting_times_are_shown(screening: ModuleType) -> None:
    assert "No time is measured yet." in screening.page()
    row = {"drafter": "base", "width": 64, "parameters": 4_205_952, "active_parameters": 1_000_000}
    rows = [
        row | {"milliseconds": 20.04, "ratio": [1.0, 1.0, 1.0]},
        row | {"drafter": "wide", "milliseconds": 25.0, "ratio": [1.25, 1.2, 1.31]},
    ]
    path = screening.REPLAYS.parent / "drafting-smollm2.json"
    path.write_text(json.dumps({"results": rows}))
    lines = screening.page().splitlines()
    assert "| `base` | 64 | 4.21M | 1.00M | 20.0 | 1 |" in lines
    assert "| `wide` | 64 | 4.21M | 1.00M | 25.0 | 1.25 [1.20, 1.31] |" in lines


def test_speeds_are_shown_for_each_kind_of_prompts_and_temperature(
    screening: ModuleType,
) -> None:
    assert "No speed is measured yet." in screening.page()
    names = ("autoregressive", "base", "base-auto", "sparse", "sparse-auto")
    document = made_up_documents(dict.fromkeys(names, 0.0), seeds=1, prompts=4)[0]
    folder = screening.RESULTS.parent
    for cell in ("summarize", "humaneval"):
        path = folder / f"long-speeds-smollm2-{cell}-t0.json"
        path.write_text(document.model_dump_json())
    text = screening.page()
    titles = [line for line in text.splitlines() if line.endswith("T = 0:")]
    assert titles == ["HumanEval, T = 0:", "Articles to summarize, T = 0:"]
    assert _shown(text) == ["autoregressive", "base", "sparse"] * 2
    (auto, other) = (document.figures(f"{name}-auto", 0.0) for name in ("base", "sparse"))
    for found, name in ((auto, "base"), (other, "sparse")):
        (row, _) = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]
        assert f"| {found.tokens_per_second:.1f} | {found.speedup:.2f} [" in row
    assert "No speed is measured yet." in screening.published_page()


def test_results_by_category_are_shown(screening: ModuleType) -> None:
    path = screening.REPLAYS / "long-prompts.json"
    _replay(path, base=[30, 30], memory=[24, 24])
    document = ReplayDocument.model_validate_json(path.read_text())
    rows = [
        row.model_copy(
            update={
                "categories": {
                    name: ReplayedCategory(prompts=7, tau=row.tau, ratio=row.ratio)
                    for name in ("short", "long")
                }
            }
        )
        for row in document.rows
    ]
    path.write_text(document.model_copy(update={"rows": tuple(rows)}).model_dump_json())
    lines = screening.page().splitlines()
    start = lines.index("| short (7) | 0 | `base` | 2.00 [1.90, 2.10] | 1 |")
    memory = "0 | `memory` | 2.50 [2.40, 2.60] | **1.250 [1.150, 1.350]** |"
    assert lines[start + 1] == f"| short (7) | {memory}"
    assert lines[start + 3] == f"| long (7) | {memory}"
    assert lines[start - 1] == f"| all (2) | {memory}"
    rows[0] = rows[0].model_copy(update={"categories": {}})  # too few prompts at this temperature
    path.write_text(document.model_copy(update={"rows": tuple(rows)}).model_dump_json())
    assert [line for line in screening.page().splitlines() if "(7)" in line] == [
        f"| short (7) | {memory}",
        f"| long (7) | {memory}",
    ]


def test_tau_over_training_tokens_is_shown(screening: ModuleType) -> None:
    taus = {"a@0.5M": [30] * 3, "a@1M": [24] * 3, "b@0.5M": [60] * 3, "b@1M": [20] * 3}
    for name, page in (("", screening.published_page), ("-long", screening.page)):
        _replay(screening.REPLAYS / f"scaling{name}-humaneval.json", **taus)
        lines = page().splitlines()
        begin = lines.index("| arm | 0.5M | 1M |")
        assert lines[begin + 2] == "| `a` | 2.00 [1.90, 2.10] | 2.50 [2.40, 2.60] |"
        assert lines[begin + 3] == "| `b` | 1.00 [0.90, 1.10] | 3.00 [2.90, 3.10] |"
        ratios = "**0.500 [0.500, 0.500]** | **1.200 [1.200, 1.200]**"
        assert lines[begin + 4] == f"| `b` / `a` | {ratios} |"


def test_the_effects_of_experts_and_contrastive_loss_are_shown(
    screening: ModuleType, tmp_path: Path
) -> None:
    _study(tmp_path / "study" / "humaneval", *screening.SQUARE)
    screening.store(tmp_path / "study")
    lines = screening.page().splitlines()
    (experts,) = [line for line in lines if line.startswith("| two experts / one |")]
    assert experts.count("[") == 2
    assert screening.page().count("| interaction |") == 1


@pytest.mark.parametrize("line", ["<!-- times -->\n", "<!-- end of times -->\n"])
def test_a_page_without_a_line_for_a_table_is_left_unchanged(
    screening: ModuleType, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["screening.py"])
    text = screening.PAGE.read_text().replace(line, "") + "after\n"
    screening.PAGE.write_text(text)
    with pytest.raises(SystemExit, match=line.strip()):
        screening.main()
    assert screening.PAGE.read_text() == text


def _training(folder: Path, settings: TrainSettings) -> None:
    """Store a finished training of a small drafter, as the records of long trainings are read."""
    target = TargetAdapter(tiny_llama())
    drafter = tiny_drafter(target, settings.drafter)
    level = {"agreement": 0.47}
    drafter.config.record = {
        "settings": settings.model_dump(mode="json"),
        "training": {"tokens": 2_016_796, "seconds": 1200.0},
        "evaluation": {
            "validation": {"levels": [level], "expert_load": [0.5, 0.5]},
            "experts": {"top_overlap": 0.25, "router_entropy": 0.69},
        },
        "provenance": {"git": None},
    }
    drafter.config.save_pretrained(folder / "drafter")


def test_long_trainings_are_stored_and_shown_with_earlier_ones(
    screening: ModuleType, tmp_path: Path
) -> None:
    assert "No training is stored yet." in screening.page()
    settings = tiny_run(tmp_path, seed=1)
    runs = tmp_path / "studies"
    for path in ("long/runs/moa", "long/runs/sparse", "long-wide/runs/base", "long/runs/base"):
        _training(runs / path / "seed-1", settings)
    screening.store_trainings(runs, screening.TRAININGS)
    shutil.rmtree(runs / "long" / "runs" / "sparse")
    screening.store_trainings(runs, screening.TRAININGS)
    width = settings.drafter.experts.intermediate_size
    text = screening.page()
    assert _shown(text) == ["base", f"base-{width}", "sparse"]
    (row,) = [line for line in text.splitlines() if line.startswith("| `sparse` |")]
    assert row.endswith("| 0.470 | 0.25 | 0.69 | 20 |")
