"""The demo's embedded target: trained once, kept in a cache, and never used half-written."""

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

# What merges may not cross. A line break takes the indentation that follows it along, so that the
# layout of a line is one token; a word takes one blank before it; digits come in threes at most.
_PIECES = r" ?\p{L}+|\p{N}{1,3}|_+| ?[^\s\p{L}\p{N}_]+|\n+[ \t]*|\s+(?!\S)|\s+"
# Part of the fingerprint: to be raised whenever the same recipe would train another target.
_REVISION = 1

_logger = get_logger(__name__)


class TrainedTarget(Settings):
    """What is known of a target, recorded beside its weights."""

    recipe: TargetRecipe
    corpus_fingerprint: str
    held_out_loss: float  # nats per token on the corpus's test files
    tokens: int  # that training predicted, counted again when read again
    seconds: float  # of training, without what an interruption lost
    sha256: dict[str, str]  # of the other files in the folder, by name


def train_target(
    preset: Preset,
    corpus: Corpus,
    folder: Path,
    progress: Progress,
    *,
    device: torch.device | str = "cpu",
    seconds_between_checkpoints: float = 60.0,
) -> Path:
    """Return a folder with the preset's target and tokenizer; train them unless they are cached.

    An interrupted training goes on from its last checkpoint, to the same weights. Of two processes
    that want the same target, one trains and the other waits for it.

    Raises:
        ConfigError: the cache cannot be written to.
        DataError: the corpus is too small for the recipe.
    """
    cache = ensure_writable_folder(folder)
    recipe = preset.target
    identity = fingerprint(_REVISION, recipe.model_dump(), corpus.fingerprint)
    home = cache / f"target-{preset.name}-{identity[:16]}"
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
            shutil.rmtree(home, ignore_errors=True)  # damaged, if it is there at all
            (partial / "target").rename(home)
            shutil.rmtree(partial)
    return home


def read_record(target: Path) -> TrainedTarget:
    """Read what is known of the target in a folder.

    Raises:
        CheckpointError: there is no such record, or it is damaged.
    """
    path = target / RECORD_NAME
    try:
        return TrainedTarget.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise CheckpointError(f"no usable record of a target at {path}", got=error) from error


def is_intact(target: Path) -> bool:
    """Whether the folder holds a target, all of whose files are as they were written."""
    try:
        return read_record(target).sha256 == _hash_files(target)
    except CheckpointError:
        return False


def train_tokenizer(texts: Sequence[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE vocabulary, in which `END_OF_TEXT` has the id 0 and also pads.

    Its pieces follow the layout of Python source. Any text survives encoding and decoding
    unchanged, and the same texts give the same tokenizer.
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
    """Encode texts one after another, each followed by the end-of-text token."""
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    encoded = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return torch.tensor([token for ids in encoded for token in [*ids, end]], dtype=torch.int64)


def _write(
    run: Pretraining, corpus: Corpus, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    recipe = run.recipe
    held_out = encode_documents(tokenizer, [file.text for file in corpus.test])
    shutil.rmtree(folder, ignore_errors=True)
    tokenizer.save_pretrained(folder)
    run.model.save_pretrained(folder)
    record = TrainedTarget(
        recipe=recipe,
        corpus_fingerprint=corpus.fingerprint,
        held_out_loss=mean_loss(run.model, held_out, recipe),
        tokens=recipe.num_steps * recipe.rows_per_step * recipe.row_tokens,
        seconds=run.seconds,
        sha256=_hash_files(folder),
    )
    write_atomically(folder / RECORD_NAME, record.model_dump_json(indent=2))


def _training_texts(recipe: TargetRecipe, corpus: Corpus) -> list[str]:
    """Return all texts, or the first of a fixed shuffle that keep to the limit."""
    limit = recipe.max_training_characters
    if limit is None:
        return [file.text for file in corpus.train]
    texts = [file.text for file in corpus.shuffled_training_files()]
    totals = accumulate(map(len, texts))
    return [text for text, total in zip(texts, totals, strict=True) if total <= limit]


def _locked(path: Path) -> AbstractContextManager[object]:
    """Let one process at a time pass; the system frees the lock of a process that was killed."""
    lock = FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        _logger.info("another process trains the same target; waiting for it")
        return lock.acquire()


def _hash_files(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name != RECORD_NAME
    }
