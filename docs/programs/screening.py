"""Program that stores the results of the screening and writes their tables into its page.

`make screening ARGS=runs/screening/study` copies what the study has measured so far
to `docs/benchmarks/results/screening/`, without texts and example trees. Without an argument, the
program only writes the tables of the stored results into `docs/benchmarks/screening.md`.
"""

import shutil
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from inference.benchmark.document import ComparisonDocument, read_document
from jakiro.utils.files import write_atomically
from training.studies.ablation.evaluation import MeasurementInputs
from training.studies.ablation.results import ArmRow, StudyResults
from training.studies.ablation.runs import MeasuredRun
from training.studies.ablation.tables import markdown_head, markdown_line, with_interval

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks" / "screening.md"
RESULTS = ROOT / "docs" / "benchmarks" / "results" / "screening"
BEGIN, END = "<!-- tables of results -->\n", "<!-- end of tables -->\n"
CELLS = {"humaneval": "HumanEval", "mt_bench": "MT-bench", "summarize": "Articles to summarize"}


def store(study: Path) -> None:
    """Copy the results of all cells of a study, without texts and example trees.

    Args:
        study: folder of the study.
    """
    for results in sorted(study.glob("*/results.json")):
        stored = RESULTS / results.parent.name / "measurements"
        stored.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(results, stored.parent / "results.json")
        for inputs in sorted(results.parent.glob("measurements/*.inputs.json")):
            measured = inputs.with_name(inputs.name.replace(".inputs.json", ".json"))
            shutil.copyfile(inputs, stored / inputs.name)
            text = _without_texts(read_document(measured)).model_dump_json(exclude_defaults=True)
            write_atomically(stored / measured.name, text + "\n")


def _without_texts(document: ComparisonDocument) -> ComparisonDocument:
    methods = tuple(
        method.model_copy(
            update={
                "samples": tuple(
                    sample.model_copy(update={"answer": None}) for sample in method.samples
                )
            }
        )
        for method in document.methods
    )
    return document.model_copy(update={"methods": methods, "trees": (), "questions": {}})


def page() -> str:
    """Return the page with the tables of the stored results."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


def tables() -> str:
    """Return all tables in Markdown: the trainings, and tau for each kind of prompts."""
    cells = [name for name in CELLS if (RESULTS / name / "results.json").exists()]
    if not cells:
        return "No arm is measured yet.\n"
    lines = ["Trainings:", "", *_trainings(cells)]
    for name in cells:
        lines += ["", *_taus(name)]
    return "\n".join(lines) + "\n"


def _trainings(cells: list[str]) -> Iterator[str]:
    names = ("arm", "parameters", "width", "steps", "tokens", "agreement", "overlap", "commit")
    yield from markdown_head(names, ("arm", "commit"))
    runs = {name: run for cell in cells for name, run in _runs(cell).items()}
    rows = {row.arm: row for cell in cells for row in _results(cell).rows}
    for name, row in rows.items():
        training: Any = runs[name].record["training"]
        evaluation: Any = runs[name].record["evaluation"]
        overlap = evaluation["experts"]["top_overlap"]
        yield markdown_line(
            [
                f"`{name}`",
                f"{row.parameters / 1e6:.2f}M",
                str(row.intermediate_size),
                str(training["step"]),
                f"{training['tokens'] / 1e3:.0f}k",
                "-" if row.validation_agreement is None else f"{row.validation_agreement:.3f}",
                "-" if overlap is None else f"{overlap:.2f}",
                _commit(runs[name]),
            ]
        )


def _taus(cell: str) -> Iterator[str]:
    results = _results(cell)
    yield f"{CELLS[cell]}, {results.prompts} prompts:"
    yield ""
    groups = [(temperature, tree) for tree in results.trees for temperature in results.temperatures]
    columns = [f"T = {temperature:g}, {_trees(tree)}" for temperature, tree in groups]
    names = [name for column in columns for name in (f"tau, {column}", f"ratio, {column}")]
    yield from markdown_head(["arm", *names], ("arm",))
    for arm in dict.fromkeys(row.arm for row in results.rows):
        document = read_document(_measurement(cell, arm))
        cells = [f"`{arm}`"]
        for temperature, tree in groups:
            row = next(row for row in results.at(temperature, tree) if row.arm == arm)
            cells += [_tau(document, row), "1" if arm == "base" else _ratio(row)]
        yield markdown_line(cells)


def _tau(document: ComparisonDocument, row: ArmRow) -> str:
    method = row.arm if row.trees is None else f"{row.arm}@{row.trees}"
    found = document.figures(method, row.temperature)
    return f"{found.tau:.2f} [{found.tau_low:.2f}, {found.tau_high:.2f}]"


def _ratio(row: ArmRow) -> str:
    text = with_interval(row.tau_ratio)
    return f"**{text}**" if row.tau_ratio.is_resolved else text


def _trees(label: str | None) -> str:
    if label is None:
        return "default trees"
    kind, _, levels = label.rpartition("-")
    return f"{levels} levels" + (" (deterministic)" if "deterministic" in kind else "")


def _results(cell: str) -> StudyResults:
    return StudyResults.model_validate_json((RESULTS / cell / "results.json").read_text())


def _measurement(cell: str, arm: str) -> Path:
    return next((RESULTS / cell / "measurements").glob(f"{arm}-[0-9].json"))


def _runs(cell: str) -> dict[str, MeasuredRun]:
    paths = (RESULTS / cell / "measurements").glob("*.inputs.json")
    inputs = [MeasurementInputs.model_validate_json(path.read_text()) for path in paths]
    return {name: run for found in inputs for name, run in found.runs.items()}


def _commit(run: MeasuredRun) -> str:
    provenance: Any = run.record["provenance"]
    git = provenance["git"]
    return "-" if git is None else git["sha"][:8] + ("*" if git["is_dirty"] else "")


def main() -> None:
    """Store the results of a study, if its folder is given, and write the tables."""
    parser = ArgumentParser(description="Store the results of the screening.")
    parser.add_argument("study", type=Path, nargs="?", help="folder of the study")
    study = parser.parse_args().study
    if study is not None:
        store(study)
    write_atomically(PAGE, page())


if __name__ == "__main__":
    main()
