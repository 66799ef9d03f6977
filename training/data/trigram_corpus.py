"""From texts or training data to counts of their trigrams."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from transformers import PreTrainedTokenizerBase

from inference.drafters.aded.file import TrigramCounter, vocabulary_size
from jakiro.errors import DataError
from jakiro.utils.logs import get_logger
from training.data.chat import CUT
from training.data.documents import encode_documents
from training.data.sources import Record, find_sources

_TEXTS: Final = (".txt", ".md", ".rst", ".py")
_ROWS: Final = (".jsonl", ".parquet")  # that are taken wherever they lie
_PIECE: Final = 1 << 16  # characters of a text that are counted before more of it is read

_logger = get_logger(__name__)


def count_trigrams(
    tokenizer: PreTrainedTokenizerBase,
    records: Iterable[Record],
    on_document: Callable[[int], None] = lambda _: None,
) -> TrigramCounter:
    """Return the counts of all documents' trigrams; none goes from one document to the next.

    Args:
        tokenizer: of the target.
        records: such as from `corpus_records`.
        on_document: told of the number of tokens so far, after each document.

    Raises:
        DataError: a row cannot be read or holds ids that the tokenizer does not have, or there is
            no trigram at all.
    """
    counter = TrigramCounter()
    size = vocabulary_size(tokenizer)
    for document in encode_documents(tokenizer, records, vocab_size=size, any_mask=True):
        counter.add(document.token_ids)
        on_document(counter.num_tokens)
    if counter.num_trigrams == 0:
        raise DataError(
            "the corpus holds no trigram",
            expected="a document of at least three tokens",
            got=f"{counter.num_tokens} tokens in all",
            remedy="check the names given to --corpus",
        )
    return counter


def corpus_records(paths: Sequence[str]) -> Iterator[Record]:
    """Yield texts and rows of data.

    In a folder, texts that are not UTF-8 are left out with a warning, and so is .json beside texts.

    Args:
        paths: training data as `data.paths` names it, text files, or folders with either.

    Raises:
        DataError: something is missing, unreadable, or of an unknown kind.
    """
    for name in paths:
        path = Path(name).expanduser()
        texts = _texts_at(path)
        for text in texts:
            if path.is_dir() and not _is_utf8(text):
                _logger.warning(f"left out: {text} is not UTF-8")
            else:
                yield from _read_text(text)
        for rows in _rows_at(path) if texts else [name]:
            for source in find_sources([rows]):
                yield from source.records()


def _texts_at(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(one for one in path.rglob("*") if one.suffix in _TEXTS and one.is_file())
    return [path] if path.suffix in _TEXTS else []


def _rows_at(path: Path) -> list[str]:
    """Return the files of rows beside texts; .json may be anything there, and is left alone."""
    if not path.is_dir():
        return []
    return [str(one) for one in sorted(path.rglob("*")) if one.suffix in _ROWS and one.is_file()]


def _is_utf8(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8") as file:
            return all(True for _ in file)
    except UnicodeDecodeError:
        return False
    except OSError:
        return True  # reading it says what is wrong


def _read_text(path: Path) -> Iterator[Record]:
    """Yield a text in pieces of whole lines: only the last one has an end."""
    try:
        with path.open(encoding="utf-8") as file:
            piece = "".join(file.readlines(_PIECE))
            while piece:
                rest = "".join(file.readlines(_PIECE))
                yield Record({"text": piece, CUT: bool(rest)}, str(path))
                piece = rest
    except (OSError, UnicodeDecodeError) as error:
        got = error.strerror if isinstance(error, OSError) else error
        raise DataError(
            f"cannot read the text {path}", expected="a file of UTF-8 text", got=got
        ) from error
