"""What the demo shows: coloured text, a table, and one line of JSON."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from inference.autotune.search import PlanChoice
from inference.benchmark.document import ComparisonDocument
from inference.benchmark.method_names import AUTOREGRESSIVE
from inference.generation.streaming import TextStream
from inference.outputs import GenerateOutput
from inference.trees.shape import TreeShape

JAKIRO = "jakiro"  # what the demo calls its drafter

# How a token was won: by the target itself, or as a draft accepted at depth 1, 2, ...
_COLOURS = ("bright_black", "green", "cyan", "magenta", "yellow", "blue")
_COLUMNS = {
    "method": "{method}",
    "T": "{temperature:g}",
    "tau": "{tau:.2f}",
    "tokens/s": "{tokens_per_second:.0f}",
    "speed-up": "{speedup:.2f}",
    "vs plain": "{speedup_over_plain:.2f}",
    "ceiling": "{ceiling}",
    "same": "{same}",
}
_KEPT = ("temperature", "tau", "tokens_per_second", "speedup", "speedup_low", "speedup_high")


def results_of(document: ComparisonDocument, choice: PlanChoice) -> list[dict[str, Any]]:
    """Return one row of figures per method and temperature.

    Speed-ups are ratios of tokens per second at the same temperature, reading the prompt included.
    `identical_to_target` is None where tokens are sampled.
    """
    rows = []
    for one in document.methods:
        plain = document.figures(AUTOREGRESSIVE, one.temperature)
        shapes = {AUTOREGRESSIVE: None, JAKIRO: _shape(one.temperature, choice)}
        is_timed = one.name in shapes
        row = {
            "speedup_over_plain": one.tokens_per_second / plain.tokens_per_second,
            "identical_to_target": one.identical_to_target,
            "ceiling": choice.costs.ceiling(shapes[one.name], one.tau) if is_timed else None,
            "acceptance_by_depth": list(one.acceptance_by_depth),
        }
        rows.append({"method": one.name} | {name: getattr(one, name) for name in _KEPT} | row)
    return rows


def show_text(
    console: Console, output: GenerateOutput, prompt: list[int], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Print a continuation; the colour of a token says how it was won."""
    text = Text(str(tokenizer.decode(prompt)), style="dim")
    stream = TextStream(tokenizer)  # a token may hold a part of a character only
    for token, depth in zip(output.new_token_ids, output.depths, strict=True):
        text.append(stream.push([token]), style=_colour(depth))
    legend = Text("\nwon by: ")
    legend.append("the target itself", style=_colour(0))
    for depth in sorted(set(output.depths) - {0}):
        legend.append(f"  draft at depth {depth}", style=_colour(depth))
    console.rule("what the target says, and how each token was won")
    console.print(text, legend)


def show_results(
    console: Console, results: list[dict[str, Any]], target: dict[str, Any], choice: PlanChoice
) -> None:
    """Print the table of figures, how easy the text was, and where drafting did not pay."""
    table = Table(
        title="tokens/s, reading the prompt included; all methods taking turns",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for name in _COLUMNS:
        table.add_column(name, no_wrap=True)
    for row in results:
        same = {None: "-", True: "yes", False: "NO"}[row["identical_to_target"]]
        ceiling = "-" if row["ceiling"] is None else f"{row['ceiling']:.0f}"
        shown = row | {"same": same, "ceiling": ceiling}
        table.add_row(*(form.format_map(shown) for form in _COLUMNS.values()))
    loss = target["held_out_loss"]
    console.print(table)
    console.print(
        "tau: tokens per target forward. speed-up: over transformers' generate(). vs plain: over "
        "our loop without a drafter. ceiling: tokens/s if only the timed forwards took time. "
        "same: greedy tokens equal those of transformers.\n"
        f"The target's held-out loss is {'unknown' if loss is None else f'{loss:.2f}'} nats per "
        f"token; {target['repeated_4gram_share']:.0%} of the 4-grams in its greedy text are "
        "repeats, which makes greedy text easy to draft.",
        *losses_explained(results, choice),
        sep="\n",
        highlight=False,
    )


def losses_explained(results: list[dict[str, Any]], choice: PlanChoice) -> list[str]:
    """Return, for each temperature at which plain decoding was faster, a sentence why."""
    plain = choice.costs.ceiling(None, 1.0)
    return [
        f"At T = {row['temperature']:g} plain decoding was faster: a drafted round takes at least "
        f"{plain / choice.costs.ceiling(_shape(row['temperature'], choice), 1.0):.2f} plain "
        f"steps and won {row['tau']:.2f} tokens."
        for row in results
        if row["method"] == JAKIRO and row["speedup_over_plain"] < 1
    ]


def _shape(temperature: float, choice: PlanChoice) -> TreeShape:
    return (choice.sampling if temperature else choice.greedy).shape


def _colour(depth: int) -> str:
    return _COLOURS[min(depth, len(_COLOURS) - 1)]
