"""Trigram counts of text files and training data."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from transformers import PreTrainedTokenizerBase

from inference.drafters.aded.table import TrigramCounter, vocabulary_size
from jakiro.errors import DataError
from jakiro.utils.logs import get_logger
from training.data.documents import encode_documents
from training.data.rendering import CUT
from training.data.sources import Record, find_sources

_logger = get_logger(__name__)

_TEXTS: Final = (".txt", ".md", ".rst", ".py")
_RECORDS: Final = (".jsonl", ".parquet")  # always read as training data
_PIECE: Final = 1 << 16  # number of characters of a text that are read at once


def count_trigrams(
    tokenizer: PreTrainedTokenizerBase,
    records: Iterable[Record],
    on_document: Callable[[int], None] = lambda _: None,
) -> TrigramCounter:
    """Return the trigram counts of all documents; a trigram never spans two documents."""
    counter = TrigramCounter()
    size = vocabulary_size(tokenizer)
    for document in encode_documents(tokenizer, records, vocab_size=size, any_mask=True):
        counter.add(document.token_ids)
        on_document(counter.num_tokens)
    if counter.num_trigrams == 0:
        raise DataError(
            "the corpus contains no trigrams, because no document has at least three tokens"
        )
    return counter


def corpus_records(paths: Sequence[str]) -> Iterator[Record]:
    """Yield the records of text files and of training data.

    In a folder, text files that are not encoded in UTF-8 are skipped with a warning, and .json
    files are skipped if there are text files.
    """
    for name in paths:
        path = Path(name).expanduser()
        texts = _files_in(path, _TEXTS)
        for text in texts:
            yield from _read_text(text, is_in_folder=path.is_dir())
        data = map(str, _files_in(path, _RECORDS)) if texts else [name]
        for source in find_sources([*data]):
            yield from source.records()


def _files_in(path: Path, endings: Sequence[str]) -> list[Path]:
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [file for file in files if file.suffix in endings and not file.is_dir()]


def _read_text(path: Path, is_in_folder: bool) -> Iterator[Record]:
    """Yield a text in pieces of whole lines; all but the last piece are marked as cut off."""
    try:
        with path.open(encoding="utf-8") as file:
            piece = "".join(file.readlines(_PIECE))
            while piece:
                rest = "".join(file.readlines(_PIECE))
                yield Record({"text": piece, CUT: bool(rest)}, str(path))
                piece = rest
    except (OSError, UnicodeDecodeError) as error:
        if not (is_in_folder and isinstance(error, UnicodeDecodeError)):
            raise DataError(f"cannot read the text {path}", got=error) from error
        _logger.warning(f"skipped: {path} is not UTF-8")
