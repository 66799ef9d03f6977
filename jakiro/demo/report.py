"""Output of the demo: colored text, a table of figures, and explanations of slowdowns."""

import shlex
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from inference.autotune.search import PlanChoice
from inference.benchmark.document import ComparisonDocument
from inference.benchmark.method_names import AUTOREGRESSIVE
from inference.generation.colored_text import pieces_by_depth, terminal_legend, terminal_style
from inference.outputs import GenerateOutput
from inference.trees.shape import TreeShape

JAKIRO = "jakiro"  # method name of the demo's drafter

_COLUMNS = {
    "method": "{method}",
    "T": "{temperature:g}",
    "tau": "{tau:.2f}",
    "tokens/s": "{tokens_per_second:.0f}",
    "speed-up": "{speedup:.2f}",
    "vs AR": "{speedup_over_autoregressive:.2f}",
    "ceiling": "{ceiling}",
    "same": "{same}",
}
_COPIED = ("temperature", "tau", "tokens_per_second", "speedup", "speedup_low", "speedup_high")


def results_of(document: ComparisonDocument, choice: PlanChoice) -> list[dict[str, Any]]:
    """Return one row of figures per method and temperature.

    Speed-ups are ratios of tokens per second at the same temperature, including prefill.
    `identical_to_target` is None if tokens are sampled.

    Args:
        document: measured figures of all methods.
        choice: selected draft trees, and the measured costs that the selection is based on.
    """
    rows = []
    for method in document.methods:
        baseline = document.figures(AUTOREGRESSIVE, method.temperature)
        shapes = {AUTOREGRESSIVE: None, JAKIRO: _shape(method.temperature, choice)}
        is_timed = method.name in shapes
        row = {
            "speedup_over_autoregressive": method.tokens_per_second / baseline.tokens_per_second,
            "identical_to_target": method.identical_to_target,
            "ceiling": choice.costs.ceiling(shapes[method.name], method.tau) if is_timed else None,
            "conditional_acceptance_rate": list(method.conditional_acceptance_rate),
        }
        copied = {name: getattr(method, name) for name in _COPIED}
        rows.append({"method": method.name} | copied | row)
    return rows


def show_text(
    console: Console, output: GenerateOutput, prompt: list[int], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Print a continuation in which the color of each token shows its depth in the draft tree.

    Args:
        console: console to print on.
        output: generated tokens with their depths; depth 0 is a token from the target itself.
        prompt: token ids of the prompt.
        tokenizer: the target's tokenizer.
    """
    text = Text(str(tokenizer.decode(prompt)), style="dim")
    for piece in pieces_by_depth(zip(output.new_token_ids, output.depths, strict=True), tokenizer):
        text.append(piece.text, style=terminal_style(piece.depth))
    console.rule("the target's continuation, and the source of each token")
    console.print(text, terminal_legend(output.depths), sep="\n\n")


def show_results(
    console: Console, results: list[dict[str, Any]], target: dict[str, Any], choice: PlanChoice
) -> None:
    """Print the results, the share of repetitions, and an explanation of any slowdown.

    Args:
        console: console to print on.
        results: rows from `results_of`.
        target: figures of the target, with the keys "validation_loss" and "repeated_4gram_share".
        choice: selected draft trees, and the measured costs that the selection is based on.
    """
    table = Table(
        title="tokens/s includes prefill; the methods were measured in interleaved order",
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
    loss = target["validation_loss"]
    console.print(table)
    console.print(
        "tau: mean acceptance length (tokens per target forward pass). speed-up: compared with "
        "transformers' generate(). vs AR: speed-up compared with Jakiro's own autoregressive "
        "decoding. ceiling: tokens/s if only the timed forward passes took time. same: whether "
        "greedy tokens are identical to those of transformers.\n"
        f"The target's held-out loss is {'unknown' if loss is None else f'{loss:.2f}'} nats per "
        f"token; {target['repeated_4gram_share']:.0%} of the 4-grams in its greedy text are "
        "repeats, which makes greedy text easy to draft.",
        *explain_slowdowns(results, choice),
        sep="\n",
        highlight=False,
    )


def show_next(console: Console, drafter: str, target: str) -> None:
    """Print the folder of a trained drafter and commands that use the drafter.

    Args:
        console: console to print on.
        drafter: folder of the drafter.
        target: folder, hub id or fetched name of the target.
    """
    bench = ["jakiro", "bench", "--target", target, "--method", "transformers"]
    commands = (
        ["jakiro", "generate", drafter, "def main("],
        [*bench, "--method", f"drafter={drafter}", "--prompts", "PROMPTS.jsonl"],
    )
    for line in (f"Drafter: {drafter}", *(f"  {shlex.join(words)}" for words in commands)):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def explain_slowdowns(results: list[dict[str, Any]], choice: PlanChoice) -> list[str]:
    """Return one sentence for each temperature at which decoding without drafts was faster.

    Args:
        results: rows from `results_of`.
        choice: selected draft trees, and the measured costs that the selection is based on.
    """
    autoregressive = choice.costs.ceiling(None, 1.0)
    return [
        f"At T = {row['temperature']:g}, autoregressive decoding was faster, because a decoding "
        "step with drafts takes at least as long as "
        f"{autoregressive / choice.costs.ceiling(_shape(row['temperature'], choice), 1.0):.2f} "
        f"autoregressive steps and yields only {row['tau']:.2f} tokens on average."
        for row in results
        if row["method"] == JAKIRO and row["speedup_over_autoregressive"] < 1
    ]


def _shape(temperature: float, choice: PlanChoice) -> TreeShape:
    return (choice.sampling if temperature else choice.greedy).shape
