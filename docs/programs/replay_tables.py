"""Tables of the stored results of `jakiro replay`, in which several trainings are pooled."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from table_cells import PROMPTS, by_depth_cell, figure_cell, ratio_cell

from inference.benchmark.replay.document import ReplayDocument, ReplayRow
from inference.benchmark.replay.names import trainings_of
from inference.benchmark.stats import Rate, Ratio, product, ratio
from training.studies.ablation.contrasts import mean_rates
from training.studies.ablation.tables import markdown_head, markdown_line

# Parts of the names of result files of further trainings.
_LATER = ("-seed1", "-seed1-memory", "-seed1-wide", "-seed1-fusion", "-seed0-sparse")


def replays(folder: Path, study: str) -> str:
    """Return a table in Markdown of the results of `jakiro replay` for a study.

    Args:
        folder: folder of the stored results.
        study: name of the study, with which the names of its result files begin.
    """
    found = {
        title: documents
        for name, title in PROMPTS.items()
        if (documents := _replays_of_all_seeds(folder, study, name))
    }
    if not found:
        return "No text is replayed yet.\n"
    names = ("prompts", "T", "drafter", "trainings", "tau", "ratio", "accepted by depth")
    lines = markdown_head(names, ("prompts", "drafter"))
    lines += [
        markdown_line([f"{title} ({documents[0].prompts})", *_replay_cells(row, documents[0])])
        for title, documents in found.items()
        for row in _pooled(documents)
    ]
    return "\n".join(lines) + "\n"


def against(folder: Path, study: str, drafter: str, other: str, seed: int) -> str:
    """Return a table in Markdown that compares trainings of two drafters with the same seed.

    Args:
        folder: folder of the stored results.
        study: name of the study, with which the names of its result files begin.
        drafter: name of a drafter.
        other: name of the drafter that it is compared with.
        seed: seed of both trainings.
    """
    names = ("prompts", "T", f"tau, `{drafter}`", f"tau, `{other}`", "ratio")
    lines = markdown_head(names, ("prompts",))
    head = len(lines)
    for cell, title in PROMPTS.items():
        documents = _replays_of_all_seeds(folder, study, cell)
        of_seed = _pooled(documents, f"/seed-{seed}/")
        pooled = {(row.drafter, row.temperature, row.trees): row for row in of_seed}
        for (name, temperature, trees), row in pooled.items():
            second = pooled.get((other, temperature, trees))
            if name != drafter or second is None:
                continue
            assert len(row.counts) == len(second.counts) == 1
            taus = [figure_cell(*_bounds(own.tau)) for own in (row, second)]
            compared = ratio(_replay_rate([row]), _replay_rate([second]))
            cells = [f"{title} ({documents[0].prompts})", f"{temperature:g}", *taus]
            lines.append(markdown_line([*cells, ratio_cell(compared)]))
    return "\n".join(lines) + "\n" if len(lines) > head else "No text is replayed yet.\n"


def by_category(path: Path) -> str:
    """Return a table in Markdown of the results of a replay: all prompts, and each category.

    Args:
        path: stored results.
    """
    if not path.exists():
        return "No text is replayed yet.\n"
    document = _replay(path)
    assert len(document.settings.trees) == 1
    base = document.rows[0].drafter
    names = ("prompts", "T", "drafter", "tau", "ratio")
    lines = markdown_head(names, ("prompts", "drafter"))
    categories = dict.fromkeys(name for row in document.rows for name in row.categories)
    for category in (None, *categories):
        for row in document.rows:
            part = row if category is None else row.categories.get(category)
            if part is None:  # there are too few prompts
                continue
            size = document.prompts if isinstance(part, ReplayRow) else part.prompts
            cells = [f"{category or 'all'} ({size})", f"{row.temperature:g}", f"`{row.drafter}`"]
            cells.append(figure_cell(*_bounds(part.tau)))
            cells.append("1" if row.drafter == base else ratio_cell(part.ratio))
            lines.append(markdown_line(cells))
    return "\n".join(lines) + "\n"


def scaling(path: Path) -> str:
    """Return a table in Markdown of tau on greedy texts after different numbers of training tokens.

    Below the arms are the ratios of tau to the first arm's.

    The drafters of the replay are named `ARM@TOKENS`.

    Args:
        path: stored results.
    """
    if not path.exists():
        return "No text is replayed yet.\n"
    document = _replay(path)
    assert (document.settings.temperatures, len(document.settings.trees)) == ((0.0,), 1)
    rows = {tuple(row.drafter.split("@")): row for row in document.rows}
    arms, tokens = (list(dict.fromkeys(names)) for names in zip(*rows, strict=True))
    lines = markdown_head(["arm", *tokens], ("arm",))
    for arm in arms:
        cells = [figure_cell(*_bounds(rows[arm, number].tau)) for number in tokens]
        lines.append(markdown_line([f"`{arm}`", *cells]))
    first, *others = arms
    for arm in others:
        pairs = [[rows[name, number] for name in (arm, first)] for number in tokens]
        cells = [ratio_cell(ratio(*(_replay_rate([row]) for row in pair))) for pair in pairs]
        lines.append(markdown_line([f"`{arm}` / `{first}`", *cells]))
    return "\n".join(lines) + "\n"


def _bounds(figure: Ratio) -> tuple[float, float, float]:
    return figure.value, figure.low, figure.high


def _replay_cells(row: ReplayRow, first: ReplayDocument) -> list[str]:
    size = "" if row.trees in first.settings.trees else f" ({row.trees})"
    return [
        f"{row.temperature:g}",
        f"`{row.drafter}`{size}",
        str(len(row.counts)),
        figure_cell(*_bounds(row.tau)),
        "1" if row.drafter == first.rows[0].drafter else ratio_cell(row.ratio),
        by_depth_cell(row.conditional_acceptance_rate),
    ]


def _replays_of_all_seeds(folder: Path, study: str, cell: str) -> list[ReplayDocument]:
    """Return the replays of a kind of prompts, which differ in seeds of the trainings or arms."""
    paths = [folder / f"{study}{part}-{cell}.json" for part in ("", *_LATER)]
    return [_replay(path) for path in paths if path.exists()]


def _replay(path: Path) -> ReplayDocument:
    document = ReplayDocument.model_validate_json(path.read_text())
    assert document.is_complete, f"{path} has the results of an interrupted replay"
    return document


def _pooled(documents: Sequence[ReplayDocument], included: str = "") -> list[ReplayRow]:
    """Return the rows of all documents by temperature; those of the same drafter are pooled.

    A drafter that was loaded from the same path for two documents is included once.

    Args:
        documents: replays of the same texts.
        included: part of the paths of drafters that are included.
    """
    # By temperature, size of trees and drafter: by path, the row of the drafter and of its base.
    found: dict[tuple[float, str, str], dict[str, tuple[ReplayRow, ReplayRow]]] = {}
    for document in documents:
        paths = {training.name: training.path for training in trainings_of(document.settings)}
        bases: dict[tuple[float, str], ReplayRow] = {}
        for row in document.rows:  # the base comes first
            base = bases.setdefault((row.temperature, row.trees), row)
            if included not in paths[row.drafter]:
                continue
            same = found.setdefault((row.temperature, row.trees, row.drafter), {})
            known, _ = same.setdefault(paths[row.drafter], (row, base))
            assert known.counts == row.counts, f"{row.drafter} was replayed on other texts"
    pooled = [_pooled_row(*zip(*several.values(), strict=True)) for several in found.values()]
    return sorted(pooled, key=lambda row: row.temperature)


def _pooled_row(rows: Sequence[ReplayRow], bases: Sequence[ReplayRow]) -> ReplayRow:
    """Return the row of several trainings, each of which is compared with the base of its replay.

    Args:
        rows: rows of a drafter in several replays of the same prompts.
        bases: rows of the base in the same replays.
    """
    if len(rows) == 1:
        return rows[0]
    rate, base = _replay_rate(rows), _replay_rate(bases)
    return rows[0].model_copy(
        update={
            "tau": product([(1.0, rate)]),
            "ratio": ratio(rate, base),
            "conditional_acceptance_rate": mean_rates(
                [row.conditional_acceptance_rate for row in rows]
            ),
            "counts": tuple(training for row in rows for training in row.counts),
        }
    )


def _replay_rate(rows: Sequence[ReplayRow]) -> Rate:
    trainings = [training for row in rows for training in row.counts]
    assert len({tuple(each.prompt for each in training) for training in trainings}) == 1
    decoded, steps = (
        np.array([[getattr(each, name) for each in training] for training in trainings], float)
        for name in ("decoded", "steps")
    )
    return Rate(decoded, steps)
