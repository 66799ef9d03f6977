"""The demo's embedded target: trained once, kept in a cache, and never used half-written."""

import hashlib
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from time import monotonic

import torch
from filelock import FileLock, Timeout
from jaxtyping import Int
from pydantic import ValidationError
from rich.progress import Progress
from torch import Tensor

from jakiro.demo.corpus import Corpus, SourceFile
from jakiro.demo.presets import Preset, TargetRecipe
from jakiro.demo.pretraining import Pretraining, mean_loss
from jakiro.demo.rows import spread_rows
from jakiro.demo.tokenizer import encode_documents, train_tokenizer
from jakiro.errors import CheckpointError
from jakiro.files import ensure_writable_folder, fingerprint, write_atomically
from jakiro.logs import get_logger
from jakiro.settings import Settings

RECORD_NAME = "target.json"

# Part of the fingerprint: to be raised whenever the same recipe would train another target.
_REVISION = 1

_logger = get_logger(__name__)


@dataclass(frozen=True)
class _Watch:
    """How a run is shown and how often it is saved."""

    progress: Progress
    seconds_between_checkpoints: float


class TrainedTarget(Settings):
    """What is known of a target, recorded beside its weights.

    Attributes:
        held_out_loss: nats per token on the corpus's test files.
        tokens: tokens that training predicted, counted again when read again.
        seconds: wall time of training and measuring, without what an interruption lost.
        sha256: of the other files in the folder, by name.
    """

    recipe: TargetRecipe
    corpus_fingerprint: str
    held_out_loss: float
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
    """Return a folder with the preset's target and tokenizer; train them unless they are cached.

    An interrupted training goes on from its last checkpoint, to the same weights. Of two processes
    that want the same target, one trains and the other waits for it.

    Args:
        preset: names the target and holds its recipe.
        corpus: what to train on; its test files measure the result.
        folder: the cache.
        progress: shows the steps.
        device: where to train.
        seconds_between_checkpoints: how much work an interruption may lose.

    Raises:
        ConfigError: the cache cannot be written to.
        DataError: the corpus is too small for the recipe.
    """
    cache = ensure_writable_folder(folder)
    identity = fingerprint(_REVISION, preset.target.model_dump(), corpus.fingerprint)
    home = cache / f"target-{preset.name}-{identity[:16]}"
    with _one_process(cache / f".{home.name}.lock"):
        if not is_intact(home):
            partial = cache / f".{home.name}.partial"
            partial.mkdir(exist_ok=True)
            watch = _Watch(progress, seconds_between_checkpoints)
            built = _build(preset.target, corpus, partial, watch, device)
            shutil.rmtree(home, ignore_errors=True)  # damaged, if it is there at all
            built.rename(home)
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


def _build(
    recipe: TargetRecipe, corpus: Corpus, partial: Path, watch: _Watch, device: torch.device | str
) -> Path:
    """Train in `partial`, from the checkpoint that may lie there; return the finished folder."""
    texts = _texts(corpus.train, recipe.max_training_characters)
    tokenizer = train_tokenizer(texts, vocab_size=recipe.vocab_size)
    checkpoint = partial / "training.pt"
    run = _start(recipe, encode_documents(tokenizer, texts), checkpoint, device)
    _finish(run, checkpoint, watch)
    held_out = spread_rows(
        encode_documents(tokenizer, _texts(corpus.test)),
        row_tokens=recipe.row_tokens,
        max_rows=recipe.held_out_rows,
    )
    folder = partial / "target"
    shutil.rmtree(folder, ignore_errors=True)
    tokenizer.save_pretrained(folder)
    run.model.save_pretrained(folder)
    record = TrainedTarget(
        recipe=recipe,
        corpus_fingerprint=corpus.fingerprint,
        held_out_loss=mean_loss(run.model, held_out),
        tokens=recipe.num_tokens,
        seconds=run.seconds,
        sha256=_hash_files(folder),
    )
    write_atomically(folder / RECORD_NAME, record.model_dump_json(indent=2))
    return folder


def _start(
    recipe: TargetRecipe,
    token_ids: Int[Tensor, " stream"],
    checkpoint: Path,
    device: torch.device | str,
) -> Pretraining:
    """Return a run at its checkpoint, or a new one where there is none or a damaged one."""
    if checkpoint.exists():
        run = Pretraining(recipe, token_ids, device=device)
        try:
            run.resume(checkpoint)
        except CheckpointError as error:
            _logger.warning("training starts anew: %s", error)
        else:
            return run
    return Pretraining(recipe, token_ids, device=device)


def _finish(run: Pretraining, checkpoint: Path, watch: _Watch) -> None:
    """Take all remaining steps, saving the run now and then."""
    task = watch.progress.add_task("Training the target", total=run.recipe.num_steps)
    watch.progress.update(task, completed=run.step)
    saved_at = monotonic()
    while not run.is_done:
        loss = run.advance()
        watch.progress.update(
            task, completed=run.step, description=f"Training the target (loss {loss:.2f})"
        )
        if monotonic() - saved_at >= watch.seconds_between_checkpoints:
            run.save(checkpoint)
            saved_at = monotonic()


@contextmanager
def _one_process(lock: Path) -> Iterator[None]:
    """Let one process at a time pass; the system frees the lock of one that was killed."""
    file_lock = FileLock(lock)
    try:
        file_lock.acquire(timeout=0)
    except Timeout:
        _logger.info("another process trains the same target; waiting for it")
        file_lock.acquire()
    try:
        yield
    finally:
        file_lock.release()


def _texts(files: Iterable[SourceFile], max_characters: int | None = None) -> list[str]:
    """Return the files' texts: all, or those whose total, in a fixed shuffle, keeps the limit."""
    if max_characters is None:
        return [file.text for file in files]
    shuffled = sorted(files, key=lambda file: fingerprint(file.path))
    lengths = accumulate(len(file.text) for file in shuffled)
    return [
        file.text
        for file, length in zip(shuffled, lengths, strict=True)
        if length <= max_characters
    ]


def _hash_files(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name != RECORD_NAME
    }
