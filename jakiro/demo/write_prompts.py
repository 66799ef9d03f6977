"""Prompts for measuring: heads of functions and classes of files of your own choice.

`python -m jakiro.demo.write_prompts --tokenizer PATH_OR_HUB_ID --out prompts.jsonl FILE...`
"""

import json
import sys
import sysconfig
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inference.pretrained import load_tokenizer
from jakiro.demo.corpus import SourceFile
from jakiro.demo.prompts import prompts_of
from jakiro.demo.write_texts import EXIT_CODE_BAD_INPUT
from jakiro.errors import DataError, JakiroError
from jakiro.files import ensure_new_file, write_atomically


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the prompts as the command line says; return 0 when done, 2 on bad input."""
    options = _parse(arguments)
    try:
        _write(options)
    except JakiroError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)  # noqa: T201
        return EXIT_CODE_BAD_INPUT
    return 0


def _write(options: Any) -> None:
    ensure_new_file(options.out, "the prompts")
    files = [_read(options.library, name) for name in options.files]
    tokenizer = load_tokenizer(options.tokenizer)
    limits = {"count": options.per_file, "max_tokens": options.max_tokens}
    rows = [
        {"prompt": prompt.text, "category": file.path, "file": file.path}
        for file in files
        for prompt in prompts_of(file, tokenizer, **limits)
    ]
    if not rows:
        raise DataError(
            "the files hold no prompt",
            expected="Python source with heads of functions or classes",
            got=", ".join(options.files),
            remedy="choose other files, or raise --max-tokens",
        )
    write_atomically(options.out, "".join(json.dumps(row) + "\n" for row in rows))


def _read(library: Path, name: str) -> SourceFile:
    try:
        return SourceFile(name, (library / name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot read {name}", expected=f"a source file in {library}", got=error
        ) from error


def _parse(arguments: Sequence[str] | None) -> Any:
    parser = ArgumentParser(prog="write_prompts", description="Write prompts to measure on.")
    parser.add_argument("files", nargs="+", metavar="FILE", help="below --library")
    parser.add_argument("--tokenizer", required=True, help="where the target's tokenizer is")
    parser.add_argument("--out", type=Path, required=True, help="a new JSONL file")
    parser.add_argument("--per-file", type=int, default=6, help="prompts of each file, at most")
    parser.add_argument("--max-tokens", type=int, default=96, help="of a prompt")
    parser.add_argument(
        "--library",
        type=Path,
        default=Path(sysconfig.get_paths()["stdlib"]),
        help="folder of the files; by default the standard library",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
