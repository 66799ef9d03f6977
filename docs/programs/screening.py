"""Program that stores the results of the screening and writes their tables into two pages.

`make screening ARGS=runs/screening/study` copies what the study has measured so far to
`docs/benchmarks/results/screening/`, without texts and example trees, and the agreement of the runs
in `runs/screening/rates`, with which the learning rate was chosen. The agreement during training is
stored for the arms whose run folders are there, and so are the records of the trainings with all
tokens in `runs/screening/long*`. Without an argument, the program
only writes the tables of the stored results: those of the arms of the screening into
`docs/benchmarks/screening.md`, and those of the drafters in `configs/drafters/` into
`docs/benchmarks/published.md`. Both pages also have the results of `jakiro replay` that are stored
in `docs/benchmarks/results/replay/`, those of `jakiro bench` in `published-smollm2-*.json` and
`long-speeds-smollm2-*.json` beside this folder, and those of `make bench-drafting`.
"""

import json
import shutil
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from long_trainings import store_trainings, trainings
from replay_tables import against, by_category, replays, scaling
from table_cells import PROMPTS, by_depth_cell, figure_cell, ratio_cell

from inference.benchmark.document import ComparisonDocument, MethodFigures, read_document
from inference.benchmark.stats import Rate, ratio
from jakiro.utils.files import write_atomically
from training.studies.ablation.arms import BASE
from training.studies.ablation.contrasts import (
    Cells,
    Counts,
    counts_of,
    prompts_in,
    two_by_two,
)
from training.studies.ablation.evaluation import MeasurementInputs
from training.studies.ablation.results import ArmRow, StudyResults
from training.studies.ablation.runs import MeasuredRun
from training.studies.ablation.tables import markdown_head, markdown_line

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks" / "screening.md"
PUBLISHED_PAGE = ROOT / "docs" / "benchmarks" / "published.md"
RESULTS = ROOT / "docs" / "benchmarks" / "results" / "screening"
REPLAYS = RESULTS.parent / "replay"
RATES = RESULTS / "rates.json"
TRAININGS = RESULTS.parent / "long-trainings.json"
CURVES = RESULTS / "curves.json"
NUM_PARTS = 5  # number of parts of a training for which the mean agreement is shown
SEED = 0
PUBLISHED = {
    *("eagle2", "jakiro-published", "moa", "moa-tail"),
    *("chimera", "gumiho", "hidden-transfer", "parallel-spec", "tensor"),
}
PUBLISHED_REFERENCE = "eagle2"  # with random weights at the start, as most of the others
SQUARE = Cells("experts-2-contrast", "experts-2", "contrast", BASE)
FP32 = {"humaneval-fp32": "HumanEval, target in fp32"}
CELLS = PROMPTS | FP32


def store(study: Path) -> None:
    """Copy the results of all cells of a study, without texts and example trees.

    Args:
        study: folder of the study.
    """
    for arms in sorted(study.glob("*/arms")):
        stored = RESULTS / arms.parent.name
        shutil.copytree(arms, stored / "arms", dirs_exist_ok=True)
        (stored / "measurements").mkdir(exist_ok=True)
        for inputs in sorted(arms.parent.glob("measurements/*.inputs.json")):
            measured = inputs.with_name(inputs.name.replace(".inputs.json", ".json"))
            shutil.copyfile(inputs, stored / "measurements" / inputs.name)
            text = _without_texts(read_document(measured)).model_dump_json(exclude_defaults=True)
            write_atomically(stored / "measurements" / measured.name, text + "\n")


def store_rates(folder: Path) -> None:
    """Store the agreement of the runs with which the learning rate was chosen.

    Args:
        folder: folder with one run folder for each learning rate.
    """
    runs = [_rate(run) for run in sorted(folder.glob("*")) if (run / "metrics.jsonl").exists()]
    if runs:
        write_atomically(RATES, json.dumps(runs, indent=1) + "\n")


def _rate(run: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "evaluation" not in line]
    after = [line for line in lines if "evaluation" in line and line["step"]]
    settings = json.loads((run / "run.json").read_text())["settings"]
    return {
        "optimizer": settings["optimizer"],
        "steps": steps[-1]["step"],
        "training": steps,
        "validation": after[-1]["evaluation"]["validation"] if after else None,
        "provenance": json.loads((run / "provenance.json").read_text()),
    }


def store_curves(study: Path) -> None:
    """Store the agreement of the passes during training, for the runs of a study.

    Curves of other runs, which were stored earlier, are kept.

    Args:
        study: folder of the study.
    """
    paths = sorted(study.glob(f"runs/*/seed-{SEED}/metrics.jsonl"))
    curves = {path.parts[-3]: curve for path in paths if (curve := _curve(path))}
    if curves:
        stored = json.loads(CURVES.read_text()) if CURVES.exists() else {}
        write_atomically(CURVES, json.dumps(stored | curves) + "\n")


def _curve(path: Path) -> list[tuple[int, float]]:
    """Return the tokens and the agreement of the passes in every record of a training."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [line for line in lines if "evaluation" not in line]
    return [(line["tokens"], line["levels"][0]["agreement"]) for line in steps]


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
    """Return the page of the screening with the tables of the stored results."""
    rates = "\n".join(_rates()) + "\n" if RATES.exists() else "No rate is measured yet.\n"
    square = (
        "\n".join(_square()) + "\n" if _has_square() else "Not all four arms are measured yet.\n"
    )
    shown = {"rates": rates, "results": tables(is_published=False), "square": square}
    shown["trainings"] = trainings(TRAININGS, left_out=PUBLISHED)
    shown["replays"] = replays(REPLAYS, "long")
    shown["scaling"] = scaling(REPLAYS / "scaling-long-humaneval.json")
    shown["long-prompts"] = by_category(REPLAYS / "long-prompts.json")
    shown["equal-time"] = against(REPLAYS, "long", "sparse-16-2", "base-6144", seed=1)
    shown["fusion"] = against(REPLAYS, "long", "fusion-ttt-2", "ttt-2", seed=1)
    shown["times"] = _times(REPLAYS.parent / "drafting-smollm2.json")
    shown["speeds"] = _speeds("long-speeds")
    return _filled(PAGE.read_text(), shown)


def _times(path: Path) -> str:
    """Return a table in Markdown of drafting times, as `make bench-drafting` measures them."""
    if not path.exists():
        return "No time is measured yet.\n"
    names = ("drafter", "width", "parameters", "for a token", "drafting, ms per step", "ratio")
    lines = markdown_head(names, ("drafter",))
    rows = json.loads(path.read_text())["results"]
    for row in rows:
        value, low, high = row["ratio"]
        sizes = [f"{row[name] / 1e6:.2f}M" for name in ("parameters", "active_parameters")]
        share = f"{value:.2f} [{low:.2f}, {high:.2f}]" if row is not rows[0] else "1"
        cells = [f"`{row['drafter']}`", str(row["width"]), *sizes]
        lines.append(markdown_line([*cells, f"{row['milliseconds']:.1f}", share]))
    return "\n".join(lines) + "\n"


def published_page() -> str:
    """Return the page of the published drafters with the tables of the stored results."""
    curves = "\n".join(_curves()) + "\n" if CURVES.exists() else "No curve is stored yet.\n"
    shown = {"results": tables(is_published=True), "curves": curves, "speeds": _speeds("published")}
    shown["replays"] = replays(REPLAYS, "published")
    shown["long-replays"] = replays(REPLAYS, "published-long")
    shown["scaling"] = scaling(REPLAYS / "scaling-humaneval.json")
    return _filled(PUBLISHED_PAGE.read_text(), shown)


def _filled(text: str, tables: Mapping[str, str]) -> str:
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        if (text.count(begin), text.count(end)) != (1, 1) or text.index(begin) > text.index(end):
            raise SystemExit(
                f"the page needs one line {begin.strip()} and, below it, one {end.strip()}"
            )
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"
    return text


def tables(*, is_published: bool) -> str:
    """Return tables in Markdown: the trainings, and tau for each kind of prompts.

    Args:
        is_published: show the published drafters instead of the arms of the screening; the base is
            shown with both.
    """
    titles = {"Trainings:": PROMPTS, "Trainings with the target in fp32:": FP32}
    lines = []
    for title, names in titles.items():
        cells = [name for name in names if len(_arms(name, is_published)) > 1]
        if cells:
            lines += [title, "", *_trainings(cells, is_published), ""]
        for name in cells:
            lines += [*_taus(name, is_published), ""]
    return "\n".join(lines[:-1] or ["No arm is measured yet."]) + "\n"


def _has_square() -> bool:
    arms = RESULTS / "humaneval" / "arms"
    return all((arms / f"{name}.json").exists() for name in SQUARE)


def _square() -> Iterator[str]:
    """Yield the effects of experts and contrastive loss on tau as a table."""
    found = {f"T = {value:g}": _square_rates(value) for value in (0.0, 1.0)}
    more = RESULTS.parent / "square-smollm2-humaneval-t1.json"
    if more.exists():
        documents = {SEED: read_document(more)}
        prompts = prompts_in(documents)
        found[f"T = 1, {len(prompts)} prompts"] = {
            name: counts_of(documents, name, 1.0, prompts).tau for name in SQUARE
        }
    yield from markdown_head(("ratio of tau", *found), ("ratio of tau",))
    squares = [two_by_two(SQUARE, 0.0, rates) for rates in found.values()]
    named = {
        "two experts / one": [each.experts for each in squares],
        "contrastive loss / none": [each.contrast for each in squares],
        "interaction": [each.interaction for each in squares],
    }
    for name, ratios in named.items():
        yield markdown_line([name, *map(ratio_cell, ratios)])


def _square_rates(temperature: float) -> dict[str, Rate]:
    arms = {arm.rows[0].arm: arm for arm in _arms("humaneval", is_published=False)}
    prompts = prompts_in({SEED: _document("humaneval", BASE)})
    rates = {}
    for name in SQUARE:
        row = next(row for row in arms[name].rows if row.temperature == temperature)
        rates[name] = _counts("humaneval", row, prompts).tau
    return rates


def _speeds(study: str) -> str:
    """Return a table in Markdown for each kind of prompts and temperature.

    The methods of each table were measured in turns.

    Args:
        study: name of the study, with which the names of its result files begin.
    """
    lines = [
        line
        for name, title in PROMPTS.items()
        for path in sorted(RESULTS.parent.glob(f"{study}-smollm2-{name}-t?.json"))
        for line in _speeds_of(title, read_document(path))
    ]
    return "\n".join(lines[:-1] or ["No speed is measured yet."]) + "\n"


def _speeds_of(title: str, document: ComparisonDocument) -> Iterator[str]:
    yield f"{title}, T = {document.methods[0].temperature:g}:"
    yield ""
    names = (
        "drafter",
        "tau",
        "acceptance by depth",
        "drafting, ms per step",
        "tokens/s",
        'tokens/s, `tree="auto"`',
        'speed-up, `tree="auto"`',
    )
    yield from markdown_head(names, ("drafter",))
    methods = {method.name: method for method in document.methods}
    for name, method in methods.items():
        if name.endswith("-auto"):
            continue
        chosen = methods.get(f"{name}-auto")
        yield markdown_line(
            [
                f"`{name}`",
                figure_cell(method.tau, method.tau_low, method.tau_high),
                by_depth_cell(method.conditional_acceptance_rate) or "-",
                f"{1e3 * method.seconds.draft / method.target_forwards:.1f}",
                f"{method.tokens_per_second:.1f}",
                "-" if chosen is None else f"{chosen.tokens_per_second:.1f}",
                "-" if chosen is None else _speedup(chosen),
            ]
        )
    yield ""


def _speedup(method: MethodFigures) -> str:
    """Return the speed-up over the baseline with its interval."""
    return figure_cell(method.speedup, method.speedup_low, method.speedup_high)


def _curves() -> Iterator[str]:
    """Yield the mean agreement in each part of the trainings as a table."""
    curves = json.loads(CURVES.read_text())
    shares = [
        f"{part / NUM_PARTS:.0%} to {(part + 1) / NUM_PARTS:.0%}" for part in range(NUM_PARTS)
    ]
    yield from markdown_head(["arm", *shares], ("arm",))
    for name in sorted(set(curves) & {BASE, *PUBLISHED}, key=lambda name: (name != BASE, name)):
        counts, agreement = (np.array(column) for column in zip(*curves[name], strict=True))
        middles = counts.cumsum() - counts / 2
        part = (middles / counts.sum() * NUM_PARTS).astype(int)
        sums, totals = (np.bincount(part, own, NUM_PARTS) for own in (counts * agreement, counts))
        cells = [
            f"{own / total:.2f}" if total else "-" for own, total in zip(sums, totals, strict=True)
        ]
        yield markdown_line([f"`{name}`", *cells])


def _rates() -> Iterator[str]:
    names = ("optimizer", "rate", "steps", "agreement in steps 11 to 20", "held-out agreement")
    yield from markdown_head(names, ("optimizer",))
    runs = json.loads(RATES.read_text())
    for run in sorted(runs, key=lambda run: run["optimizer"]["learning_rate"]):
        optimizer, held_out = run["optimizer"], run["validation"]
        training = next(line for line in run["training"] if line["step"] == 20)
        cells = [optimizer["kind"], f"{optimizer['learning_rate']:g}", str(run["steps"])]
        cells.append(f"{training['levels'][0]['agreement']:.3f}")
        cells.append("-" if held_out is None else f"{held_out['levels'][0]['agreement']:.3f}")
        yield markdown_line(cells)


def _trainings(cells: list[str], is_published: bool) -> Iterator[str]:
    names = ("arm", "parameters", "width", "steps", "tokens", "agreement")
    yield from markdown_head([*names, "overlap", "entropy", "commit"], ("arm", "commit"))
    runs = {name: run for cell in cells for name, run in _runs(cell).items()}
    arms = {
        found.rows[0].arm: found.rows[0] for cell in cells for found in _arms(cell, is_published)
    }
    for name, row in arms.items():
        training: Any = runs[name].record["training"]
        evaluation: Any = runs[name].record["evaluation"]
        experts = evaluation["experts"]
        overlap, entropy = experts["top_overlap"], experts["router_entropy"]
        yield markdown_line(
            [
                f"`{name}`",
                f"{row.parameters / 1e6:.2f}M",
                str(row.intermediate_size),
                str(training["step"]),
                f"{training['tokens'] / 1e3:.0f}k",
                "-" if row.validation_agreement is None else f"{row.validation_agreement:.3f}",
                "-" if overlap is None else f"{overlap:.2f}",
                f"{entropy:.2f}" if entropy else "-",
                _commit(runs[name]),
            ]
        )


def _taus(cell: str, is_published: bool) -> Iterator[str]:
    arms = {found.rows[0].arm: found for found in _arms(cell, is_published)}
    first = arms[BASE]
    reference = arms.get(PUBLISHED_REFERENCE, first) if is_published else first
    prompts = prompts_in({SEED: _document(cell, BASE)})
    yield f"{CELLS[cell]}, {first.prompts} prompts:"
    yield ""
    groups = [(temperature, tree) for tree in first.trees for temperature in first.temperatures]
    columns = [
        f"T = {temperature:g}" + ("" if len(first.trees) == 1 else f", trees {tree}")
        for temperature, tree in groups
    ]
    names = [name for column in columns for name in (f"tau, {column}", f"ratio, {column}")]
    depths = [f"accepted by depth, {column}" for column in columns]
    yield from markdown_head(["arm", *names, *depths], ("arm",))
    for name, arm in arms.items():
        document = _document(cell, name)
        cells, accepted = [f"`{name}`"], []
        for group in groups:
            (row,), (other,) = arm.at(*group), reference.at(*group)
            taus = [_counts(cell, each, prompts).tau for each in (row, other)]
            cells += [_tau(document, row), "1" if arm is reference else ratio_cell(ratio(*taus))]
            accepted.append(by_depth_cell(row.conditional_acceptance_rate))
        yield markdown_line([*cells, *accepted])


def _counts(cell: str, row: ArmRow, prompts: Mapping[str, int]) -> Counts:
    return counts_of({SEED: _document(cell, row.arm)}, _method(row), row.temperature, prompts)


def _tau(document: ComparisonDocument, row: ArmRow) -> str:
    found = document.figures(_method(row), row.temperature)
    return f"{found.tau:.2f} [{found.tau_low:.2f}, {found.tau_high:.2f}]"


def _method(row: ArmRow) -> str:
    return row.arm if row.trees is None else f"{row.arm}@{row.trees}"


def _document(cell: str, name: str) -> ComparisonDocument:
    return read_document(RESULTS / cell / "measurements" / f"{name}-{SEED}.json")


def _arms(cell: str, is_published: bool) -> list[StudyResults]:
    """Return the results of the base and of the arms of a cell that belong to one page."""
    paths = sorted((RESULTS / cell / "arms").glob("*.json"), key=lambda path: path.stem)
    paths = [p for p in paths if p.stem == BASE or (p.stem in PUBLISHED) == is_published]
    paths.sort(key=lambda path: path.stem != BASE)
    return [StudyResults.model_validate_json(path.read_text()) for path in paths]


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
        store_rates(study.parent / "rates")
        store_curves(study)
        store_trainings(study.parent, TRAININGS)
    write_atomically(PAGE, page())
    write_atomically(PUBLISHED_PAGE, published_page())


if __name__ == "__main__":
    main()
