"""What the demo's drafter learns from: library source, and the target's own continuations of it."""

import json
from pathlib import Path
from typing import Any

import torch
from pydantic import PositiveInt
from rich.progress import Progress
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from jakiro.demo.corpus import Corpus
from jakiro.files import fingerprint, write_atomically
from jakiro.settings import Settings

_REVISION = 1


class TextRecipe(Settings):
    """How much text the drafter sees.

    Attributes:
        num_files: training files of the library, in a fixed shuffle.
        num_batches: batches of the target's own continuations, half of them greedy; drafts are
            made for what the target writes, which is not what people wrote.
        batch: continuations made at a time.
        start_tokens: tokens of library source that a continuation starts from.
        new_tokens: tokens that the target adds.
        temperature: of the continuations that are not greedy.
    """

    num_files: PositiveInt
    num_batches: PositiveInt
    batch: PositiveInt = 64
    start_tokens: PositiveInt = 48
    new_tokens: PositiveInt = 208
    temperature: float = 0.9


def write_texts(
    recipe: TextRecipe,
    corpus: Corpus,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    target_identity: str,
    folder: Path,
    progress: Progress,
) -> Path:
    """Return a JSONL file of `{"text"}` rows; it is made once and kept in `folder`.

    Args:
        recipe: how much of what.
        corpus: its training files are used.
        model: the target.
        tokenizer: its tokenizer.
        target_identity: tells targets apart in the cache.
        folder: the cache.
        progress: shows the batches.
    """
    identity = fingerprint(_REVISION, recipe.model_dump(), corpus.fingerprint, target_identity)
    path = folder / f"texts-{identity[:16]}.jsonl"
    if not path.exists():
        texts = texts_for(recipe, corpus, model, tokenizer, progress)
        write_atomically(path, "".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def texts_for(
    recipe: TextRecipe,
    corpus: Corpus,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    progress: Progress,
) -> list[str]:
    """Return the target's own continuations, then source files; arguments as for `write_texts`."""
    shuffled = sorted(corpus.train, key=lambda file: fingerprint(file.path))
    own = _continuations(recipe, [file.text for file in shuffled], model, tokenizer, progress)
    return [*own, *(file.text for file in shuffled[: recipe.num_files])]


def _continuations(
    recipe: TextRecipe,
    texts: list[str],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    progress: Progress,
) -> list[str]:
    starts = _starts(recipe, texts, tokenizer)
    task = progress.add_task("Letting the target write", total=recipe.num_batches)
    written: list[str] = []
    generate: Any = model.generate
    for number, batch in enumerate(starts.split(recipe.batch)):
        torch.manual_seed(number)
        law = {"do_sample": True, "temperature": recipe.temperature} if number % 2 else {}
        tokens = generate(
            batch.to(model.device),
            attention_mask=torch.ones_like(batch).to(model.device),
            max_new_tokens=recipe.new_tokens,
            pad_token_id=0,
            **({"do_sample": False} | law),
        )
        written += tokenizer.batch_decode(tokens, skip_special_tokens=True)
        progress.advance(task)
    return written


def _starts(
    recipe: TextRecipe, texts: list[str], tokenizer: PreTrainedTokenizerBase
) -> torch.Tensor:
    """Cut equally long starts out of the texts, one of each in turn, at fixed random places."""
    generator = torch.Generator().manual_seed(0)
    count, length = recipe.num_batches * recipe.batch, recipe.start_tokens
    streams = [tokenizer.encode(text, add_special_tokens=False) for text in texts[:count]]
    usable = [ids for ids in streams if len(ids) > length]
    starts = []
    for index in range(count):
        ids = usable[index % len(usable)]
        place = int(torch.randint(len(ids) - length, (), generator=generator))
        starts.append(ids[place : place + length])
    return torch.tensor(starts)
