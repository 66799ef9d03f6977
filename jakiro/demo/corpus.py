"""Text of the demo: Python's standard library, and continuations that the target generates."""

import hashlib
import json
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from rich.progress import Progress
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from jakiro.demo.presets import TextRecipe
from jakiro.errors import DataError
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.files import fingerprint, write_atomically

Split = Literal["train", "dev", "test"]
STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])

# Percentages of the files, assigned by a hash of the path; the other files are for training.
_PERCENT_DEV, _PERCENT_TEST = 5, 5
# Folders that are left out: third-party packages, generated tables, and test suites. Test suites
# are left out because some Python distributions lack them, and the corpus must be the same
# everywhere.
_FOREIGN = {"site-packages", "dist-packages", "__pycache__", "__phello__", "encodings"}
_FOREIGN |= {"pydoc_data", "test", "tests", "idle_test"}
# Names of build records start with these; the records are left out, because machines differ.
_BUILD_RECORDS = ("config-", "_sysconfigdata")


class SourceFile(NamedTuple):
    """The path of a source file below the library's root (always with `/`), and its text."""

    path: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Source files of each split, sorted by path, and a hash of all source files.

    Models are trained on `train` only, settings are selected on `dev`, and results are reported on
    `test`.
    """

    train: tuple[SourceFile, ...]
    dev: tuple[SourceFile, ...]
    test: tuple[SourceFile, ...]
    fingerprint: str

    def files(self, split: Split) -> tuple[SourceFile, ...]:
        """Return the files of one split."""
        return {"train": self.train, "dev": self.dev, "test": self.test}[split]

    def shuffled_training_files(self) -> list[SourceFile]:
        """Return the training files in a fixed random order."""
        return sorted(self.train, key=lambda file: fingerprint(file.path))


def load_corpus(root: Path = STANDARD_LIBRARY, *, min_characters: int = 1_000_000) -> Corpus:
    """Read the library's Python files, without test suites, tables, and third-party packages.

    Args:
        root: folder of the library.
        min_characters: smallest number of characters that the corpus must have.

    Raises:
        DataError: the corpus is smaller than `min_characters`, or a split is empty, for example
            because the Python installation is zipped, frozen, or stripped.
    """
    files = list(_read_files(root))
    by_split = {
        split: tuple(file for file in files if split_of(file.path) == split)
        for split in get_args(Split)
    }
    num_characters = sum(len(file.text) for file in files)
    if num_characters < min_characters or not all(by_split.values()):
        raise DataError(
            f"too little Python source in {root}",
            expected=f"at least {min_characters:,} characters, with files in each split",
            got=f"{num_characters:,} characters in {len(files)} files",
            remedy="use a Python installation that has its standard library as .py files",
        )
    return Corpus(**by_split, fingerprint=fingerprint(files))


def split_of(path: str) -> Split:
    """Return the split of a file, which depends only on its path below the library's root."""
    percent = int.from_bytes(hashlib.sha1(path.encode()).digest()[:8]) % 100
    if percent < _PERCENT_TEST:
        return "test"
    return "dev" if percent < _PERCENT_TEST + _PERCENT_DEV else "train"


def cached_texts(
    recipe: TextRecipe,
    corpus: Corpus,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    progress: Progress,
) -> Path:
    """Return the path of a JSONL file of `{"text"}` records; write the file if it is not cached.

    Args:
        recipe: amount of text.
        corpus: source files of the library.
        model: the target.
        tokenizer: the target's tokenizer.
        folder: folder of the cache.
        progress: progress display.
    """
    target = TargetAdapter(model).spec.fingerprint
    key = fingerprint(1, recipe.model_dump(), corpus.fingerprint, target)
    path = folder / f"texts-{key[:16]}.jsonl"
    if not path.exists():
        texts = texts_for(recipe, corpus, model, tokenizer, progress)
        write_records(path, ({"text": text} for text in texts))
    return path


def write_records(path: Path, records: Iterable[Mapping[str, str]]) -> None:
    """Write a JSONL file.

    Args:
        path: file to write.
        records: contents, one per line.
    """
    write_atomically(path, "".join(json.dumps(record) + "\n" for record in records))


def texts_for(
    recipe: TextRecipe,
    corpus: Corpus,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    progress: Progress,
) -> list[str]:
    """Return continuations that the target generates, followed by source files.

    The continuations are needed because a drafter has to predict text that the target generates.

    Args:
        recipe: amount of text.
        corpus: source files of the library.
        model: the target.
        tokenizer: the target's tokenizer.
        progress: progress display.
    """
    sources = [file.text for file in corpus.shuffled_training_files()]
    task = progress.add_task("Generating with the target", total=recipe.num_batches)
    written: list[str] = []
    generate: Any = model.generate
    for number, batch in enumerate(_starts(recipe, sources, tokenizer).split(recipe.batch)):
        torch.manual_seed(number)
        tokens = generate(
            batch.to(model.device),
            attention_mask=torch.ones_like(batch).to(model.device),
            max_new_tokens=recipe.new_tokens,
            pad_token_id=0,
            do_sample=number % 2 == 1,
            **({"temperature": recipe.temperature} if number % 2 else {}),
        )
        written += tokenizer.batch_decode(tokens, skip_special_tokens=True)
        progress.advance(task)
    return written + sources[: recipe.num_files]


def _starts(
    recipe: TextRecipe, texts: list[str], tokenizer: PreTrainedTokenizerBase
) -> torch.Tensor:
    """Return excerpts of texts for the target to continue: equal lengths, fixed random offsets."""
    generator = torch.Generator().manual_seed(0)
    count, length = recipe.num_batches * recipe.batch, recipe.start_tokens
    streams = (tokenizer.encode(text, add_special_tokens=False) for text in texts[:count])
    starts = []
    for ids in islice(cycle([ids for ids in streams if len(ids) > length]), count):
        offset = int(torch.randint(len(ids) - length, (), generator=generator))
        starts.append(ids[offset : offset + length])
    return torch.tensor(starts)


def _read_files(root: Path) -> Iterator[SourceFile]:
    for path in sorted(root.rglob("*.py"), key=Path.as_posix):
        name = path.relative_to(root)
        if _FOREIGN.isdisjoint(name.parts[:-1]) and not name.parts[0].startswith(_BUILD_RECORDS):
            with suppress(OSError, UnicodeDecodeError):  # a few files are deliberately not UTF-8
                if (text := path.read_text(encoding="utf-8")).strip():
                    yield SourceFile(name.as_posix(), text)
