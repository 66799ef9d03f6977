"""Tables of the measured costs of a target and its drafters, and of the resulting choices."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from rich import box
from rich.console import RenderableType
from rich.table import Table

from inference.autotune.compute import (
    TREE_NODES,
    ComputeGrid,
    known_grid,
    possible_ways,
)
from inference.autotune.costs import LONG_CONTEXT, Costs, known_costs
from inference.autotune.draft_forms import ROWS, FormSeconds, known_form_seconds
from inference.drafters.trained.forms import DraftForms
from inference.engine.threads import num_threads
from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter
from jakiro.target.weight_forms import WEIGHT_FORMS


def costs_tables(
    target: TargetAdapter, drafters: Mapping[str, JakiroDrafter], folder: Path
) -> Iterator[RenderableType]:
    """Measure everything that automatic choices depend on, and yield a table of each measurement.

    Args:
        target: the frozen target.
        drafters: trained drafters, each under its name, on the target's device and in its dtype;
            empty to measure only the target.
        folder: folder for the measurements; measurements that it contains are not repeated.
    """
    grid = known_grid(target, list(possible_ways(target, "auto", "auto")), folder)
    yield _compute_table(grid)
    for name, model in drafters.items() or {"": None}.items():
        best = grid.best(drafts=True)
        best.prepare(target)
        with num_threads(best.threads):
            formats = None if model is None else known_form_seconds(target, model, folder)
            forms = DraftForms() if formats is None else formats.fastest
            costs = known_costs(target, model, folder, forms)
        if formats is not None and formats.head:
            yield _formats_table(name, formats)
        yield _costs_table(name, costs, forms)


def _compute_table(grid: ComputeGrid) -> Table:
    table = _table(
        "Milliseconds of a forward pass of the target",
        ("way to compute", "1 token", f"{TREE_NODES + 1} tokens", "chosen for steps"),
    )
    chosen = {"without drafts": False, "with drafts": True}
    for way in grid.ways:
        uses = [use for use, drafts in chosen.items() if grid.best(drafts=drafts) == way.compute]
        seconds = (f"{value * 1e3:.1f}" for value in (way.token, way.tree))
        table.add_row(str(way.compute), *seconds, ", ".join(uses))
    return table


def _formats_table(name: str, formats: FormSeconds) -> Table:
    table = _table(
        f"Milliseconds of {name} on {ROWS} nodes, by the format of its weights",
        ("format", "layers", "head", "chosen for"),
    )
    for form in WEIGHT_FORMS:
        parts = {"layers": formats.layers, "head": formats.head}
        ms = [f"{own[form] * 1e3:.2f}" if form in own else "-" for own in parts.values()]
        uses = [part for part in parts if getattr(formats.fastest, part) == form]
        table.add_row(form, *ms, ", ".join(uses))
    return table


def _costs_table(name: str, costs: Costs, forms: DraftForms) -> Table:
    title = "Milliseconds of the parts of a decoding step"
    if name:
        in_words = {"own": "as loaded", "packed": "reordered"}
        head, layers = (in_words.get(form, form) for form in (forms.head, forms.layers))
        title += f", with {name} (weights of the layers: {layers}; of the head: {head})"
    table = _table(title, ("part", "ms", "relative to a step without drafts"))
    alone = costs.verify_seconds(0)
    parts = _parts(costs)
    if costs.long is not None:
        long = _parts(costs.long)
        parts |= {f"{part}, {LONG_CONTEXT:,} tokens": value for part, value in long.items()}
    if costs.read:
        parts["reading a token for drafting"] = costs.read
    for part, seconds in parts.items():
        digits = 1 if seconds > 1e-4 else 3
        table.add_row(part, f"{seconds * 1e3:.{digits}f}", f"{seconds / alone:.{digits + 1}f}")
    return table


def _parts(costs: Costs) -> dict[str, float]:
    """Return the seconds of each part in the shorter of the two contexts."""
    verified = {f"nodes verified: {count}": value for count, value in costs.verify.items()}
    return verified | {f"drafting passes: {passes}": own for passes, own in costs.draft.items()}


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if 0 < number < 3 else "left", no_wrap=True)
    return table
