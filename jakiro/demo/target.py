"""The demo's toy target: trained once, kept in a cache, and checked for damage before use."""

import hashlib
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from jaxtyping import Int
from pydantic import ValidationError
from rich.progress import Progress
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from jakiro.demo.corpus import Corpus
from jakiro.demo.presets import Preset, TargetRecipe
from jakiro.demo.pretraining import Pretraining, mean_loss
from jakiro.errors import CheckpointError
from jakiro.utils.files import ensure_writable_folder, fingerprint, write_atomically
from jakiro.utils.logs import get_logger
from jakiro.utils.settings import Settings

END_OF_TEXT = "<|endoftext|>"
RECORD_NAME = "target.json"

# Text is split into pieces, and no token extends over more than one piece. Line breaks and the
# indentation after them are one piece, so that they can become one token. A word and the space
# before it are one piece. A piece that consists of digits has at most three.
_PIECES = r" ?\p{L}+|\p{N}{1,3}|_+| ?[^\s\p{L}\p{N}_]+|\n+[ \t]*|\s+(?!\S)|\s+"
# This number is part of the fingerprint. Raise it whenever a change of the code makes the same
# recipe produce a different target.
_REVISION = 1

_logger = get_logger(__name__)


class TrainedTarget(Settings):
    """Record of a trained target, stored with its weights.

    Attributes:
        recipe: recipe of the target.
        corpus_fingerprint: hash of the source files.
        validation_loss: loss in nats per token on the corpus's test files.
        tokens: number of tokens predicted in training, including repetitions.
        seconds: duration of the training, excluding steps that an interruption discarded.
        sha256: hash of every other file in the folder, by file name.
    """

    recipe: TargetRecipe
    corpus_fingerprint: str
    validation_loss: float
    tokens: int
    seconds: float
    sha256: dict[str, str]


def train_target(
    preset: Preset,
    corpus: Corpus,
    folder: Path,
    progress: Progress,
    *,
    device: torch.device | str = "cpu",
    seconds_between_checkpoints: float = 60.0,
) -> Path:
    """Return a folder with the preset's target and tokenizer; train them if they are not cached.

    An interrupted training run resumes from its last checkpoint and ends with the same weights as
    an uninterrupted run. If two processes need the same target, the first process trains the target
    and the second process waits.

    Args:
        preset: preset of the demo.
        corpus: source files.
        folder: folder of the cache.
        progress: progress display.
        device: device to train on.
        seconds_between_checkpoints: smallest number of seconds between two checkpoints.

    Raises:
        ConfigError: the cache cannot be written to.
        DataError: the corpus is too small for the recipe.
    """
    cache = ensure_writable_folder(folder)
    recipe = preset.target
    key = fingerprint(_REVISION, recipe.model_dump(), corpus.fingerprint)
    home = cache / f"target-{preset.name}-{key[:16]}"
    with _locked(cache / f".{home.name}.lock"):
        if not is_intact(home):
            partial = cache / f".{home.name}.partial"
            partial.mkdir(exist_ok=True)
            texts = _training_texts(recipe, corpus)
            tokenizer = train_tokenizer(texts, vocab_size=recipe.vocab_size)
            stream, checkpoint = encode_documents(tokenizer, texts), partial / "training.pt"
            run = Pretraining(recipe, stream, device=device, checkpoint=checkpoint)
            run.finish(progress, "Training the target", seconds_between=seconds_between_checkpoints)
            _write(run, corpus, tokenizer, partial / "target")
            shutil.rmtree(home, ignore_errors=True)  # if this folder exists, it is damaged
            (partial / "target").rename(home)
            shutil.rmtree(partial)
    return home


def read_record(target: Path) -> TrainedTarget:
    """Return the record of the trained target in a folder.

    Raises:
        CheckpointError: the record is missing or damaged.
    """
    path = target / RECORD_NAME
    try:
        return TrainedTarget.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise CheckpointError(f"cannot read a target's record at {path}", got=error) from error


def is_intact(target: Path) -> bool:
    """Return whether a folder holds a target whose files all match the hashes in its record."""
    try:
        return read_record(target).sha256 == _hash_files(target)
    except CheckpointError:
        return False


def train_tokenizer(texts: Sequence[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer in which `END_OF_TEXT` has id 0 and serves as padding.

    Tokens are adapted to the layout of Python source (see `_PIECES`). Decoding an encoded text
    returns the text unchanged, and the same training texts always give the same tokenizer.

    Args:
        texts: training text.
        vocab_size: size of the vocabulary.
    """
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_PIECES), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def encode_documents(
    tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]
) -> Int[Tensor, " tokens"]:
    """Return the token ids of all texts in one stream, with `END_OF_TEXT` after each text.

    Args:
        tokenizer: tokenizer that has the token `END_OF_TEXT`.
        texts: texts to encode.
    """
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    encoded = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return torch.tensor([token for ids in encoded for token in [*ids, end]], dtype=torch.int64)


def _write(
    run: Pretraining, corpus: Corpus, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    recipe = run.recipe
    validation = encode_documents(tokenizer, [file.text for file in corpus.test])
    shutil.rmtree(folder, ignore_errors=True)
    tokenizer.save_pretrained(folder)
    run.model.save_pretrained(folder)
    record = TrainedTarget(
        recipe=recipe,
        corpus_fingerprint=corpus.fingerprint,
        validation_loss=mean_loss(run.model, validation, recipe),
        tokens=recipe.num_steps * recipe.sequences_per_step * recipe.sequence_length,
        seconds=run.seconds,
        sha256=_hash_files(folder),
    )
    write_atomically(folder / RECORD_NAME, record.model_dump_json(indent=2))


def _training_texts(recipe: TargetRecipe, corpus: Corpus) -> list[str]:
    """Return all training texts or, if the recipe has a limit, the first ones in shuffled order."""
    limit = recipe.max_training_characters
    if limit is None:
        return [file.text for file in corpus.train]
    texts = [file.text for file in corpus.shuffled_training_files()]
    totals = accumulate(map(len, texts))
    return [text for text, total in zip(texts, totals, strict=True) if total <= limit]


def _locked(path: Path) -> AbstractContextManager[object]:
    """Acquire a lock that only one process can hold; it is released when that process ends."""
    lock = FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        _logger.info("waiting for another process that is training the same target")
        return lock.acquire()


def _hash_files(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name != RECORD_NAME
    }
