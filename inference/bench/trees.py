"""Chosen against drawn draft trees: `python -m inference.bench.trees --drafter PATH`.

Both kinds have the same number of nodes, which is what verification costs, and the same number of
drafter passes. Prints a table to standard error and, as its last line, one JSON document to
standard output.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from inference.bench.document import emit, environment
from inference.bench.intervals import Interval, interval
from inference.bench.subject import add_target_options, load_drafter, load_target, start
from inference.bench.texts import add_prompt_options, load_prompts
from inference.bench.timing import note
from inference.drafters.trained import TrainedDrafter
from inference.stats import DecodeStats
from inference.tree_shape import TreeShape
from jakiro.drafter import JakiroDrafter
from jakiro.target import TargetAdapter

MAX_CHILDREN = 4
POOL = {"children": 4, "breadth": 3}  # of chosen trees, of which the best N nodes stay


class Cell(NamedTuple):
    """One tree at one temperature."""

    temperature: float
    shape: TreeShape

    @property
    def num_nodes(self) -> int:
        """Nodes of every tree."""
        return self.shape.max_nodes

    @property
    def kind(self) -> str:
        """Whether candidates are drawn or chosen."""
        return "drawn" if self.shape.sampled else "chosen"


Results = dict[Cell, list[DecodeStats]]  # of each prompt


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and the document."""
    options = _parse(arguments)
    # The drafter knows where its target is.
    options.target = options.target or _target_of(options.drafter)
    target = TargetAdapter(load_target(options))
    drafter = load_drafter(options.drafter, target)
    prompts = load_prompts(options, target)
    levels = drafter.config.settings.schedule.parallel_levels
    shapes = list(tree_shapes(options.nodes, options.passes, levels))
    cells = [Cell(temperature, shape) for temperature in options.temperatures for shape in shapes]
    results = _measure(target, drafter, cells, prompts, options.new_tokens)
    rows = [_row(cell, results) for cell in cells]
    _show(rows)
    emit({"trees": rows, "environment": environment(target, options)})
    return 0


def tree_shapes(
    node_counts: Sequence[int], passes: Sequence[int], parallel_levels: int
) -> Iterator[TreeShape]:
    """Yield for each number of nodes and passes the chosen tree, then all drawn ones of that size.

    A number of nodes that no drawn tree has is left out.
    """
    for levels in passes:
        for count in node_counts:
            common = {"autoregressive_levels": levels, "parallel_levels": parallel_levels}
            drawn = [shape for shape in _drawn(common) if shape.max_nodes == count]
            if drawn:
                yield TreeShape(**common, **POOL, num_nodes=count)
                yield from drawn


def _drawn(common: dict[str, int]) -> Iterator[TreeShape]:
    for children in range(1, MAX_CHILDREN + 1):
        for breadth in range(1, children + 1):
            yield TreeShape(**common, children=children, breadth=breadth, sampled=True)


def _measure(
    target: TargetAdapter,
    drafter: JakiroDrafter,
    cells: Sequence[Cell],
    prompts: Sequence[list[int]],
    new_tokens: int,
) -> Results:
    """Decode every prompt with every tree, in turns; the first prompt once more to warm up."""
    results: Results = {cell: [] for cell in cells}
    drafters = {cell.shape: TrainedDrafter(drafter, target, cell.shape) for cell in cells}
    for place, prompt in enumerate([prompts[0], *prompts]):
        for cell in cells:
            law = {"seed": place, "top_k": 0} if cell.temperature else {"seed": place}
            run = start(target, drafters[cell.shape], [prompt], new_tokens, cell.temperature, **law)
            stats = run.finish().stats
            if place > 0:
                results[cell].append(stats)
        note(f"prompt {place} of {len(prompts)}")
    return results


def _row(cell: Cell, results: Results) -> dict[str, Any]:
    row = {
        "temperature": cell.temperature,
        "passes": cell.shape.autoregressive_levels,
        "nodes": cell.num_nodes,
        "kind": cell.kind,
        "children": cell.shape.children,
        "breadth": cell.shape.breadth,
        "tau": interval(results[cell], _tau)._asdict(),
        "tokens_per_second": interval(results[cell], _speed)._asdict(),
    }
    if cell.shape.sampled:
        row |= {
            "tau_over_chosen": _difference(results, cell)._asdict(),
            "speed_over_chosen": _ratio(results, cell)._asdict(),
        }
    return row


def _tau(several: Sequence[DecodeStats]) -> float:
    return DecodeStats.pooled(several).tau


def _speed(several: Sequence[DecodeStats]) -> float:
    return DecodeStats.pooled(several).tokens_per_second


def _pairs(results: Results, cell: Cell) -> list[tuple[DecodeStats, DecodeStats]]:
    """Return each prompt's counts with a drawn tree and with the chosen one of equal cost."""
    (other,) = (one for one in results if not one.shape.sampled and _cost(one) == _cost(cell))
    return list(zip(results[cell], results[other], strict=True))


def _cost(cell: Cell) -> tuple[float, int, int]:
    return cell.temperature, cell.num_nodes, cell.shape.autoregressive_levels


def _difference(results: Results, cell: Cell) -> Interval:
    def difference(pairs: Sequence[tuple[DecodeStats, DecodeStats]]) -> float:
        return _tau([one for one, _ in pairs]) - _tau([other for _, other in pairs])

    return interval(_pairs(results, cell), difference)


def _ratio(results: Results, cell: Cell) -> Interval:
    def ratio(pairs: Sequence[tuple[DecodeStats, DecodeStats]]) -> float:
        return _speed([one for one, _ in pairs]) / _speed([other for _, other in pairs])

    return interval(_pairs(results, cell), ratio)


def _show(rows: Sequence[dict[str, Any]]) -> None:
    note("   T passes nodes kind   (children, breadth)  tau                  tokens/s")
    for row in rows:
        tau, speed = row["tau"], row["tokens_per_second"]
        line = (
            f"{row['temperature']:4} {row['passes']:6} {row['nodes']:5} {row['kind']:6} "
            f"({row['children']}, {row['breadth']})  {tau['value']:.2f} "
            f"[{tau['low']:.2f}, {tau['high']:.2f}]  {speed['value']:6.1f} "
            f"[{speed['low']:.1f}, {speed['high']:.1f}]"
        )
        if (over := row.get("tau_over_chosen")) is not None:
            line += f"  tau {over['value']:+.2f} [{over['low']:+.2f}, {over['high']:+.2f}]"
        note(line)


def _target_of(drafter: str) -> str:
    return JakiroDrafter.from_pretrained(drafter).config.target_record.name_or_path


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare chosen with drawn draft trees.")
    add_target_options(parser)
    add_prompt_options(parser, count=20, new_tokens=48)
    parser.add_argument("--drafter", required=True, help="folder of a trained drafter")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.5, 0.8, 1.0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 6, 8, 12])
    parser.add_argument("--passes", type=int, nargs="+", default=[1, 2])
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
