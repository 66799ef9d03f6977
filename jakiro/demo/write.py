"""Input files for measurements: training texts, prompts, and a small model that drafts.

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

from jakiro.demo.corpus import (
    STANDARD_LIBRARY,
    Corpus,
    SourceFile,
    load_corpus,
    texts_for,
    write_records,
)
from jakiro.demo.presets import TargetRecipe, TextRecipe
from jakiro.demo.pretraining import Pretraining
from jakiro.demo.prompts import prompts_from_file
from jakiro.errors import DataError, JakiroError
from jakiro.utils.files import ensure_new_file
from jakiro.utils.pretrained import load_causal_lm, load_tokenizer
from training.distributed.processes import choose_device

EXIT_CODE_BAD_INPUT = 2

_LEAVE_OUT = "prompt files to measure on; the source files of their prompts are left out"


def write_texts(
    target: str, out: Path, *, files: int = 200, batches: int = 8, leave_out: Sequence[Path] = ()
) -> None:
    """Write training text for any target: its continuations of library source, and the source.

    Args:
        target: folder or hub id of the target.
        out: JSONL file to write.
        files: number of source files.
        batches: number of batches of 64 continuations.
        leave_out: prompt files; the source files of their prompts are left out.

    Raises:
        ConfigError: `out` exists.
        CheckpointError: the target cannot be loaded.
        DataError: a prompt file cannot be read, or the source of the standard library is missing.
    """
    ensure_new_file(out, "the texts")
    corpus = without_files(load_corpus(), leave_out)
    model = load_causal_lm(target, "the target", dtype=torch.float32).eval()
    torch.nn.Module.to(model, choose_device("auto"))
    recipe = TextRecipe(num_files=files, num_batches=batches)
    with Progress(console=Console(stderr=True)) as progress:
        texts = texts_for(recipe, corpus, model, load_tokenizer(target), progress)
    write_records(out, ({"text": text} for text in texts))


def write_prompts(
    files: Sequence[str],
    tokenizer: str,
    out: Path,
    *,
    per_file: int = 6,
    max_tokens: int = 96,
    library: Path = STANDARD_LIBRARY,
) -> None:
    """Write prompts to measure on: heads of functions and classes from source files.

    Args:
        files: paths below `library`.
        tokenizer: folder or hub id of the target's tokenizer, to count tokens.
        out: JSONL file to write.
        per_file: greatest number of prompts per file.
        max_tokens: greatest number of tokens per prompt.
        library: folder of the source files.

    Raises:
        ConfigError: `out` exists.
        CheckpointError: the tokenizer cannot be loaded.
        DataError: a file cannot be read, or there are no prompts.
    """
    ensure_new_file(out, "the prompts")
    sources = [SourceFile(name, _read(library / name, "a source file")) for name in files]
    counter = load_tokenizer(tokenizer)
    records = [
        {"prompt": prompt.text, "category": prompt.path, "file": prompt.path}
        for source in sources
        for prompt in prompts_from_file(source, counter, count=per_file, max_tokens=max_tokens)
    ]
    if not records:
        raise DataError(
            "the files hold no prompt",
            expected="Python source with heads of functions or classes",
            got=", ".join(files),
            remedy="choose other files, or raise --max-tokens",
        )
    write_records(out, records)


def write_small_lm(
    tokenizer: str, texts: Path, out: Path, *, layers: int = 2, hidden: int = 128, steps: int = 600
) -> None:
    """Train a small language model with a target's tokenizer, to draft for that target.

    Args:
        tokenizer: folder or hub id of the target's tokenizer.
        texts: JSONL file of `{"text"}` to train on.
        out: folder to write.
        layers: number of layers.
        hidden: width of the hidden states.
        steps: number of optimizer steps of 2,048 tokens each.

    Raises:
        ConfigError: `out` exists.
        CheckpointError: the tokenizer cannot be loaded.
        DataError: the texts cannot be read, or are shorter than one batch.
    """
    ensure_new_file(out, "the model")
    encoder = load_tokenizer(tokenizer)
    documents = (encoder.encode(text, add_special_tokens=False) for text in _fields(texts, "text"))
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
    stream = torch.tensor([token for ids in documents for token in ids], dtype=torch.int64)
    run = Pretraining(recipe, stream)
    with Progress(console=Console(stderr=True)) as progress:
        run.finish(progress, "Training")
    run.model.eval().save_pretrained(out)
    encoder.save_pretrained(out)


def without_files(corpus: Corpus, prompts: Iterable[Path]) -> Corpus:
    """Return the corpus without the training files that records of prompt files name as `file`.

    Args:
        corpus: source files.
        prompts: JSONL files of prompts.

    Raises:
        DataError: a prompt file cannot be read.
    """
    foreign = {name for path in prompts for name in _fields(path, "file", is_needed=False)}
    return replace(corpus, train=tuple(file for file in corpus.train if file.path not in foreign))


def _fields(path: Path, key: str, *, is_needed: bool = True) -> list[str]:
    expected = f'a JSONL file of {{"{key}"}}' if is_needed else "a JSONL file"
    lines = _read(path, expected).splitlines()
    try:
        records = [json.loads(line) for line in lines if line]
        return [str(record[key]) for record in records if is_needed or key in record]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"cannot read {path}", expected=expected, got=error) from error


def _read(path: Path, expected: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}", expected=expected, got=error) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 when done, 2 on bad input."""
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
    texts.add_argument("--files", type=int, default=200, help="number of source files")
    texts.add_argument("--batches", type=int, default=8, help="batches of 64 continuations")
    texts.add_argument("--leave-out", type=Path, nargs="*", default=[], help=_LEAVE_OUT)
    prompts = commands.add_parser("prompts", description="Write prompts to measure on.")
    prompts.set_defaults(write=write_prompts)
    prompts.add_argument("files", nargs="+", metavar="FILE", help="path below --library")
    prompts.add_argument("--tokenizer", required=True, help="folder or hub id of the tokenizer")
    prompts.add_argument("--out", type=Path, required=True, help="a new JSONL file")
    prompts.add_argument("--per-file", type=int, default=6, help="most prompts per file")
    prompts.add_argument("--max-tokens", type=int, default=96, help="most tokens per prompt")
    prompts.add_argument("--library", type=Path, default=STANDARD_LIBRARY, help="folder of files")
    small = commands.add_parser("small-lm", description="Train a small language model.")
    small.set_defaults(write=write_small_lm)
    small.add_argument("--tokenizer", required=True, help="folder or hub id of the tokenizer")
    small.add_argument("--texts", type=Path, required=True, help='a JSONL file of {"text"}')
    small.add_argument("--out", type=Path, required=True, help="a new folder")
    small.add_argument("--layers", type=int, default=2, help="number of layers")
    small.add_argument("--hidden", type=int, default=128, help="width of the hidden states")
    small.add_argument("--steps", type=int, default=600, help="steps of 2,048 tokens each")
    return parser


if __name__ == "__main__":
    sys.exit(main())
