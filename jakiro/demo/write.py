"""Inputs of measurements: training texts, prompts, and a small language model that drafts.

The commands of `jakiro data` write these files.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from inference.generation.prompt_file import read_prompt_lines
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
from jakiro.errors import DataError
from jakiro.utils.files import ensure_new_file
from jakiro.utils.pretrained import choose_device, load_causal_lm, load_tokenizer
from jakiro.utils.progress import ProgressDisplay


def write_texts(
    target: str, out: Path, *, files: int = 200, batches: int = 8, leave_out: Sequence[Path] = ()
) -> None:
    """Write training text for a target: texts that the target continues, and library source files.

    Args:
        target: folder or hub id of the target.
        out: JSONL file to write.
        files: number of source files.
        batches: number of batches of 64 continuations.
        leave_out: prompt files; the source files that contain their prompts are left out.

    Raises:
        ConfigError: `out` exists, or its folder does not.
        CheckpointError: the target cannot be loaded.
        PromptError: a prompt file cannot be read.
        DataError: the source of the standard library is missing.
    """
    ensure_new_file(out, "the texts")
    corpus = without_files(load_corpus(), leave_out)
    model = load_causal_lm(target, dtype=torch.float32, device=choose_device("auto"))
    recipe = TextRecipe(num_files=files, num_batches=batches)
    with ProgressDisplay() as progress:
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
    """Write prompts for measurements: source code up to the header of a function or class.

    Args:
        files: paths of source files below `library`.
        tokenizer: folder or hub id of the target's tokenizer, used to count tokens.
        out: JSONL file to write.
        per_file: largest number of prompts per file.
        max_tokens: largest number of tokens per prompt.
        library: folder of the source files.

    Raises:
        ConfigError: `out` exists, or its folder does not.
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
            "no prompts can be made from the source files",
            expected="Python source files with functions or classes",
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
        texts: JSONL file of `{"text"}` records to train on.
        out: folder to write.
        layers: number of layers.
        hidden: width of the hidden states.
        steps: number of optimizer steps of 2,048 tokens each.

    Raises:
        ConfigError: `out` exists, or its folder does not.
        CheckpointError: the tokenizer cannot be loaded.
        DataError: the texts cannot be read, or are too short for the training.
    """
    ensure_new_file(out, "the model")
    encoder = load_tokenizer(tokenizer)
    documents = (encoder.encode(text, add_special_tokens=False) for text in _texts_in(texts))
    recipe = TargetRecipe(
        vocab_size=len(encoder),
        num_layers=layers,
        hidden_size=hidden,
        num_heads=max(1, hidden // 32),
        num_kv_heads=1,
        head_dim=32,
        intermediate_size=hidden * 11 // 4,
        sequences_per_step=8,
        num_steps=steps,
    )
    stream = torch.tensor([token for ids in documents for token in ids], dtype=torch.int64)
    run = Pretraining(recipe, stream)
    with ProgressDisplay() as progress:
        run.finish(progress, "Training")
    run.model.eval().save_pretrained(out)
    encoder.save_pretrained(out)


def without_files(corpus: Corpus, prompts: Iterable[Path]) -> Corpus:
    """Return the corpus without the training files that the prompts in prompt files come from.

    Args:
        corpus: source files.
        prompts: prompt files; the key `file` of each prompt contains the path of its source file.

    Raises:
        PromptError: a prompt file cannot be read.
    """
    lines = (line for path in prompts for line in read_prompt_lines(path))
    foreign = {line.fields.get("file") for line in lines}
    return replace(corpus, train=tuple(file for file in corpus.train if file.path not in foreign))


def _texts_in(path: Path) -> list[str]:
    expected = 'a JSONL file of {"text"} records'
    lines = _read(path, expected).split("\n")  # texts may contain other ends of lines
    try:
        return [str(json.loads(line)["text"]) for line in lines if line.strip()]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"cannot read {path}", expected=expected, got=error) from error


def _read(path: Path, expected: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}", expected=expected, got=error) from error
