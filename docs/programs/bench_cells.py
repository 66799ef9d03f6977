"""Program that measures chat models on several files of prompts: `make bench-cells`.

A cell is one file of prompts at one setting of the sampling, such as `T=1` or `T=0.2,top_p=0.9`. In
each cell, `jakiro bench` compares the same methods on the same prompts: a seeded choice from the
last three quarters of the file. The first quarter is left for development. A conversation is one
prompt, with all its turns. At the end, a table for each setting is printed in Markdown.

A run can be interrupted at any time. It goes on with the first cell that has no result in the
folder, and refuses results of other prompts or of another command:

    make bench-cells ARGS="--target TARGET --drafter DRAFTER --prompts HumanEval=humaneval.jsonl
                           --prompts MT-bench=mt_bench.jsonl --setting T=0 --setting T=1
                           --num-prompts 24 --folder RESULTS"

With `--decode 12`, only 12 of the chosen prompts are decoded, from all categories in turn. The page
about chat models has 24 problems of HumanEval, and 12 of 24 chosen conversations of MT-bench.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from inference.benchmark.document import ComparisonDocument, MethodFigures, read_document
from inference.generation.prompt_file import read_prompt_lines
from jakiro.errors import ConfigError, DataError, JakiroError
from jakiro.utils.files import ensure_writable_folder, write_atomically

BASELINE = "transformers"
METHODS = (BASELINE, "transformers-lookup", "autoregressive", "lookup", "aded")
OPTIONS = {"T": "--temperature", "top_p": "--top-p", "top_k": "--top-k"}
LABELS = {
    "aded-warm": "aded, with a table",
    "trained": "trained drafter",
    "trained-lookup": "lookup + trained drafter",
}
STANDARD_ERROR = 2  # file descriptor


class Cell(NamedTuple):
    """One file of prompts at one setting.

    Attributes:
        name: name of the prompts.
        setting: setting of the sampling, such as `T=0`.
        prompts: file of the chosen prompts.
        path: file of the result.
        options: options of `jakiro bench` that determine the result together with the prompts.
    """

    name: str
    setting: str
    prompts: Path
    path: Path
    options: list[str]


def methods(drafter: str, table: str | None) -> list[str]:
    """Return the methods that are compared in each cell.

    Args:
        drafter: the trained drafter.
        table: table of trigrams with which `aded` starts; None to compare it only without a table.
    """
    warm = [] if table is None else [f"aded={table},name=aded-warm"]
    trained = f"drafter={drafter}"
    return [*METHODS, *warm, f"{trained},name=trained", f"lookup+{trained},name=trained-lookup"]


def choose_prompts(path: Path, count: int, seed: int) -> str:
    """Return a choice from the last three quarters of a file of prompts, in the order of the file.

    Args:
        path: file of prompts, as for `jakiro bench`.
        count: number of prompts, each of which may be a whole conversation.
        seed: seed of the choice.

    Returns:
        The chosen prompts as JSONL.

    Raises:
        DataError: the last three quarters of the file have fewer prompts.
        PromptError: the file cannot be read.
    """
    lines = read_prompt_lines(path)
    rest = lines[-(-len(lines) // 4) :]
    if count > len(rest):
        raise DataError(
            f"{path} has too few prompts",
            expected=f"{count} prompts in its last three quarters",
            got=len(rest),
            remedy="lower --num-prompts, or give another file",
        )
    chosen = sorted(Random(seed).sample(range(len(rest)), count))
    return "".join(json.dumps(rest[index].fields) + "\n" for index in chosen)


def write_prompts(path: Path, content: str) -> None:
    """Write the chosen prompts, unless the folder has results of other prompts.

    Args:
        path: file to write.
        content: the prompts as JSONL.

    Raises:
        DataError: the file has other prompts.
    """
    if path.exists() and path.read_text() != content:
        raise DataError(
            f"{path} has other prompts than those that were chosen now",
            expected="the same files of prompts, number of prompts and seed as before",
            got="another choice",
            remedy="use the same options, or another --folder",
        )
    write_atomically(path, content)


def setting_options(setting: str) -> list[str]:
    """Return the options of `jakiro bench` for a setting.

    Args:
        setting: `T=...`, and optionally `top_p=...` and `top_k=...` after commas.

    Raises:
        ConfigError: the setting is malformed.
    """
    values = dict(part.partition("=")[::2] for part in setting.split(","))
    if "T" not in values or not values.keys() <= OPTIONS.keys() or not all(values.values()):
        raise ConfigError(
            f"--setting {setting} cannot be used",
            expected="a setting such as T=0 or T=0.2,top_p=0.9",
            got=setting,
        )
    return [word for name, value in values.items() for word in (OPTIONS[name], value)]


def cells_of(arguments: argparse.Namespace) -> list[Cell]:
    """Return all cells, after the chosen prompts of each file were written.

    Args:
        arguments: arguments of the program.

    Raises:
        ConfigError: a name or a setting is malformed.
        DataError: a file has too few prompts, or the folder has results of other prompts.
    """
    settings = {setting: setting_options(setting) for setting in arguments.setting}
    files = dict(_named_file(word) for word in arguments.prompts)
    folder = ensure_writable_folder(arguments.folder)
    for name, file in files.items():
        content = choose_prompts(file, arguments.num_prompts, arguments.seed)
        write_prompts(folder / f"{name}.jsonl", content)
    fixed = _fixed_options(arguments)
    return [
        Cell(
            name,
            setting,
            folder / f"{name}.jsonl",
            folder / f"{name}-{setting.lower().replace('=', '').replace(',', '-')}.json",
            [*fixed, *options],
        )
        for setting, options in settings.items()
        for name in files
    ]


def _named_file(word: str) -> tuple[str, Path]:
    name, _, file = word.partition("=")
    if not file or not re.fullmatch(r"[\w.-]+", name):
        raise ConfigError(
            f"--prompts {word} cannot be used",
            expected="NAME=FILE, with a name of letters, digits, dots and dashes",
            got=word,
        )
    return name, Path(file)


def _fixed_options(arguments: argparse.Namespace) -> list[str]:
    """Return the options that are the same in all cells."""
    names = methods(arguments.drafter, arguments.table)
    return [
        *("--target", arguments.target, "--dtype", arguments.dtype, "--baseline", BASELINE),
        *("--max-new-tokens", str(arguments.tokens)),
        *(word for name in names for word in ("--method", name)),
        *(() if arguments.decode is None else ("--num-prompts", str(arguments.decode))),
    ]


def measure(cell: Cell) -> None:
    """Measure a cell; its result gets its name only when it is complete.

    Args:
        cell: cell without a result.

    Raises:
        JakiroError: `jakiro bench` has failed, or was interrupted.
    """
    partial = cell.path.with_name(f".{cell.path.name}.partial")
    partial.unlink(missing_ok=True)
    files = ["--prompts", str(cell.prompts), "--json", str(partial)]
    words = [sys.executable, "-m", "jakiro", "bench", *cell.options, *files]
    code = subprocess.run(words, check=False, stdout=STANDARD_ERROR).returncode
    if code:
        raise JakiroError(
            f"{cell.name} at {cell.setting} was not measured",
            got=f"exit code {code} of `jakiro bench`",
            remedy="see its messages, and run the program again to go on",
        )
    partial.replace(cell.path)


def result_of(cell: Cell) -> ComparisonDocument:
    """Return the result of a cell.

    Args:
        cell: cell that was measured in this run or an earlier one.

    Raises:
        DataError: the result is not that of this cell.
    """
    document = read_document(cell.path)
    own = list(document.environment.argv)[2:][: len(cell.options)]  # after program and command
    if own != cell.options:
        raise DataError(
            f"{cell.path} was measured with another command",
            expected=" ".join(cell.options),
            got=" ".join(own),
            remedy="use the same options, or another --folder",
        )
    return document


def table(setting: str, documents: dict[str, ComparisonDocument]) -> str:
    """Return the figures of all cells with one setting as a table in Markdown.

    Args:
        setting: the setting.
        documents: results by the names of their prompts.
    """
    columns = [f"{name}: {own}" for name in documents for own in ("tau", "tokens/s", "speed-up")]
    rows = [["method", *columns]]
    for several in zip(*(document.methods for document in documents.values()), strict=True):
        name = several[0].name
        rows.append([LABELS.get(name, name), *(word for own in several for word in _shown(own))])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    title = setting.replace("=", " = ").replace(",", ", ")
    return f"{title}:\n\n" + "\n".join(lines) + "\n"


def _shown(own: MethodFigures) -> list[str]:
    """Return tau, tokens per second, and the speed-up with its interval."""
    interval = f" [{own.speedup_low:.2f}, {own.speedup_high:.2f}]"
    speedup = f"{own.speedup:.2f}{'' if own.name == BASELINE else interval}"
    return [f"{own.tau:.2f}", f"{own.tokens_per_second:.1f}", speedup]


def run(arguments: argparse.Namespace) -> str:
    """Measure all cells that have no result yet, and return the tables of all cells.

    Args:
        arguments: arguments of the program.
    """
    found: dict[str, dict[str, ComparisonDocument]] = {}
    cells = cells_of(arguments)
    for cell in cells:
        if cell.path.exists():
            result_of(cell)  # refuses other results before anything is measured
    for cell in cells:
        if not cell.path.exists():
            measure(cell)
        found.setdefault(cell.setting, {})[cell.name] = result_of(cell)
    return "\n".join(table(setting, documents) for setting, documents in found.items())


def main(words: Sequence[str] | None = None) -> None:
    """Run the program.

    Args:
        words: arguments; None for those of the command line.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument(
        "--num-prompts", type=int, default=24, help="prompts to choose of each file"
    )
    parser.add_argument("--decode", type=int, help="prompts to decode; by default all chosen ones")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of prompts")
    parser.add_argument("--setting", action="append", required=True, metavar="T=0.2,top_p=0.9")
    parser.add_argument("--table", help="trigrams that `jakiro aded build` has counted")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each answer")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--folder", type=Path, required=True)
    sys.stdout.write(run(parser.parse_args(words)))


if __name__ == "__main__":
    try:
        main()
    except JakiroError as error:
        sys.exit(f"error: {error}")
