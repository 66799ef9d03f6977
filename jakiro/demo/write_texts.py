"""Training text for any target: library source, and the target's own continuations of it.

`python -m jakiro.demo.write_texts --target PATH_OR_HUB_ID --out texts.jsonl`
"""

import json
import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from jakiro.demo.corpus import Corpus, load_corpus
from jakiro.demo.texts import TextRecipe, texts_for
from jakiro.errors import DataError, JakiroError
from jakiro.files import ensure_new_file, write_atomically
from training.input_settings import TargetSettings
from training.loading import load_model, load_tokenizer
from training.processes import choose_device

EXIT_CODE_BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the texts as the command line says; return 0 when done, 2 on bad input."""
    options = _parse(arguments)
    try:
        _write(options)
    except JakiroError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)  # noqa: T201
        return EXIT_CODE_BAD_INPUT
    return 0


def without_files(corpus: Corpus, prompts: Iterable[Path]) -> Corpus:
    """Return the corpus without the training files that prompts were cut from.

    Args:
        corpus: the library.
        prompts: JSONL files whose rows may name their `file`.

    Raises:
        DataError: a file cannot be read.
    """
    foreign = {name for path in prompts for name in _files_named(path)}
    kept = tuple(file for file in corpus.train if file.path not in foreign)
    return replace(corpus, train=kept)


def _files_named(path: Path) -> set[str]:
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
        return {str(row["file"]) for row in rows if "file" in row}
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot read the prompts in {path}", expected="a JSONL file", got=error
        ) from error


def _write(options: Any) -> None:
    ensure_new_file(options.out, "the texts")
    corpus = without_files(load_corpus(), options.leave_out)
    settings = TargetSettings(name_or_path=options.target)
    model: Any = load_model(settings).eval()
    model.to(choose_device("auto"))
    recipe = TextRecipe(num_files=options.files, num_batches=options.batches)
    with Progress(console=Console(stderr=True)) as progress:
        texts = texts_for(recipe, corpus, model, load_tokenizer(settings), progress)
    write_atomically(options.out, "".join(json.dumps({"text": text}) + "\n" for text in texts))


def _parse(arguments: Sequence[str] | None) -> Any:
    parser = ArgumentParser(prog="write_texts", description="Write training text for a target.")
    parser.add_argument("--target", required=True, help="folder or hub id of a causal LM")
    parser.add_argument("--out", type=Path, required=True, help="a new JSONL file")
    parser.add_argument("--files", type=int, default=200, help="source files to take")
    parser.add_argument(
        "--batches", type=int, default=8, help="batches of 64 continuations by the target"
    )
    parser.add_argument(
        "--leave-out",
        type=Path,
        nargs="*",
        default=[],
        help="prompt files to be measured on: what they were cut from is left out",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
