"""Files that measurements begin with: training texts, prompts, and a small model to draft.

`python -m jakiro.demo.write {texts,prompts,small-lm} --help`
"""

import json
import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from inference.generation.prompt_file import read_prompt_lines
from jakiro.demo.corpus import (
    STANDARD_LIBRARY,
    Corpus,
    SourceFile,
    load_corpus,
    texts_for,
    write_rows,
)
from jakiro.demo.presets import TargetRecipe, TextRecipe
from jakiro.demo.pretraining import Pretraining
from jakiro.demo.prompts import prompts_of
from jakiro.errors import DataError, JakiroError
from jakiro.utils.files import ensure_new_file
from jakiro.utils.pretrained import choose_device, load_causal_lm, load_tokenizer

EXIT_CODE_BAD_INPUT = 2

_LEAVE_OUT = "prompt files to be measured on: what they were cut from is left out"


def write_texts(
    target: str, out: Path, *, files: int = 200, batches: int = 8, leave_out: Sequence[Path] = ()
) -> None:
    """Write training text for any target: its continuations of library source, and the source."""
    ensure_new_file(out, "the texts")
    corpus = without_files(load_corpus(), leave_out)
    model = load_causal_lm(target, dtype=torch.float32, device=choose_device("auto"))
    recipe = TextRecipe(num_files=files, num_batches=batches)
    with Progress(console=Console(stderr=True)) as progress:
        texts = texts_for(recipe, corpus, model, load_tokenizer(target), progress)
    write_rows(out, ({"text": text} for text in texts))


def write_prompts(
    files: Sequence[str],
    tokenizer: str,
    out: Path,
    *,
    per_file: int = 6,
    max_tokens: int = 96,
    library: Path = STANDARD_LIBRARY,
) -> None:
    """Write prompts to measure on: heads of functions and classes of files below `library`."""
    ensure_new_file(out, "the prompts")
    sources = [SourceFile(name, _read(library / name, "a source file")) for name in files]
    counted_by = load_tokenizer(tokenizer)
    rows = [
        {"prompt": prompt.text, "category": prompt.path, "file": prompt.path}
        for source in sources
        for prompt in prompts_of(source, counted_by, count=per_file, max_tokens=max_tokens)
    ]
    if not rows:
        raise DataError(
            "the files hold no prompt",
            expected="Python source with heads of functions or classes",
            got=", ".join(files),
            remedy="choose other files, or raise --max-tokens",
        )
    write_rows(out, rows)


def write_small_lm(
    tokenizer: str, texts: Path, out: Path, *, layers: int = 2, hidden: int = 128, steps: int = 600
) -> None:
    """Train a small language model with a target's tokenizer, to draft for it."""
    ensure_new_file(out, "the model")
    encoder = load_tokenizer(tokenizer)
    rows = (encoder.encode(text, add_special_tokens=False) for text in _texts_in(texts))
    recipe = TargetRecipe(
        vocab_size=len(encoder),
        num_layers=layers,
        hidden_size=hidden,
        num_heads=max(1, hidden // 32),
        num_kv_heads=1,
        head_dim=32,
        intermediate_size=hidden * 11 // 4,
        rows_per_step=8,
        num_steps=steps,
    )
    stream = torch.tensor([token for row in rows for token in row], dtype=torch.int64)
    run = Pretraining(recipe, stream)
    with Progress(console=Console(stderr=True)) as progress:
        run.finish(progress, "Training")
    run.model.eval().save_pretrained(out)
    encoder.save_pretrained(out)


def without_files(corpus: Corpus, prompts: Iterable[Path]) -> Corpus:
    """Return the corpus without the training files that prompts were cut from.

    Args:
        corpus: files of source code.
        prompts: files of prompts; the key `file` of a prompt names its file of source code.

    Raises:
        PromptError: a file of prompts cannot be read.
    """
    lines = (line for path in prompts for line in read_prompt_lines(path))
    foreign = {line.fields.get("file") for line in lines}
    return replace(corpus, train=tuple(file for file in corpus.train if file.path not in foreign))


def _texts_in(path: Path) -> list[str]:
    expected = 'a JSONL file of {"text"}'
    lines = _read(path, expected).splitlines()
    try:
        return [str(json.loads(line)["text"]) for line in lines if line]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"cannot read {path}", expected=expected, got=error) from error


def _read(path: Path, expected: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}", expected=expected, got=error) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Write what the command line says; return 0 when done, 2 on bad input."""
    options = vars(_parser().parse_args(arguments))
    write = options.pop("write")
    try:
        write(**options)
    except JakiroError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)  # noqa: T201
        return EXIT_CODE_BAD_INPUT
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="write")
    commands = parser.add_subparsers(required=True)
    texts = commands.add_parser("texts", description="Write training text for a target.")
    texts.set_defaults(write=write_texts)
    texts.add_argument("--target", required=True, help="folder or hub id of a causal LM")
    texts.add_argument("--out", type=Path, required=True, help="a new JSONL file")
    texts.add_argument("--files", type=int, default=200, help="source files to take")
    texts.add_argument("--batches", type=int, default=8, help="of 64 continuations by the target")
    texts.add_argument("--leave-out", type=Path, nargs="*", default=[], help=_LEAVE_OUT)
    prompts = commands.add_parser("prompts", description="Write prompts to measure on.")
    prompts.set_defaults(write=write_prompts)
    prompts.add_argument("files", nargs="+", metavar="FILE", help="below --library")
    prompts.add_argument("--tokenizer", required=True, help="where the target's tokenizer is")
    prompts.add_argument("--out", type=Path, required=True, help="a new JSONL file")
    prompts.add_argument("--per-file", type=int, default=6, help="prompts of each file, at most")
    prompts.add_argument("--max-tokens", type=int, default=96, help="of a prompt")
    prompts.add_argument("--library", type=Path, default=STANDARD_LIBRARY, help="where files are")
    small = commands.add_parser("small-lm", description="Train a small language model.")
    small.set_defaults(write=write_small_lm)
    small.add_argument("--tokenizer", required=True, help="where the target's tokenizer is")
    small.add_argument("--texts", type=Path, required=True, help='a JSONL file of {"text"}')
    small.add_argument("--out", type=Path, required=True, help="a new folder")
    small.add_argument("--layers", type=int, default=2)
    small.add_argument("--hidden", type=int, default=128, help="size of its hidden states")
    small.add_argument("--steps", type=int, default=600, help="of 2,048 tokens each")
    return parser


if __name__ == "__main__":
    sys.exit(main())
