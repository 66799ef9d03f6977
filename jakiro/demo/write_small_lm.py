"""A small language model with a target's tokenizer, to draft for it, trained from nothing.

`python -m jakiro.demo.write_small_lm --tokenizer PATH_OR_HUB_ID --texts texts.jsonl --out FOLDER`
"""

import json
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from inference.pretrained import load_tokenizer
from jakiro.demo.presets import TargetRecipe
from jakiro.demo.pretraining import Pretraining
from jakiro.demo.write_texts import EXIT_CODE_BAD_INPUT
from jakiro.errors import DataError, JakiroError
from jakiro.files import ensure_new_file


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and store the model as the command line says; return 0 when done, 2 on bad input."""
    options = _parse(arguments)
    try:
        _write(options)
    except JakiroError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)  # noqa: T201
        return EXIT_CODE_BAD_INPUT
    return 0


def small_recipe(vocab_size: int, num_layers: int, hidden_size: int, steps: int) -> TargetRecipe:
    """Return the recipe of a model whose heads have 32 channels."""
    return TargetRecipe(
        vocab_size=vocab_size,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=max(1, hidden_size // 32),
        num_kv_heads=1,
        head_dim=32,
        intermediate_size=hidden_size * 11 // 4,
        rows_per_step=8,
        num_steps=steps,
    )


def _write(options: Any) -> None:
    ensure_new_file(options.out, "the model")
    tokenizer = load_tokenizer(options.tokenizer)
    stream = _encode(options.texts, tokenizer)
    recipe = small_recipe(len(tokenizer), options.layers, options.hidden, options.steps)
    with Progress(console=Console(stderr=True)) as progress:
        model = _train(recipe, stream, progress)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)


def _encode(path: Path, tokenizer: PreTrainedTokenizerBase) -> Int[Tensor, " tokens"]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        texts = [str(json.loads(line)["text"]) for line in lines if line]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"cannot read the texts in {path}", expected='a JSONL file of {"text"}', got=error
        ) from error
    rows = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    return torch.tensor([token for row in rows for token in row], dtype=torch.int64)


def _train(
    recipe: TargetRecipe, stream: Int[Tensor, " tokens"], progress: Progress
) -> LlamaForCausalLM:
    run = Pretraining(recipe, stream)
    task = progress.add_task("Training", total=recipe.num_steps)
    while not run.is_done:
        loss = run.advance()
        progress.update(task, completed=run.step, description=f"Training (loss {loss:.2f})")
    return run.model.eval()


def _parse(arguments: Sequence[str] | None) -> Any:
    parser = ArgumentParser(prog="write_small_lm", description="Train a small language model.")
    parser.add_argument("--tokenizer", required=True, help="where the target's tokenizer is")
    parser.add_argument("--texts", type=Path, required=True, help='a JSONL file of {"text"}')
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128, help="size of its hidden states")
    parser.add_argument("--steps", type=int, default=600, help="of 2,048 tokens each")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
