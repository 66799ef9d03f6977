"""What stops a run: losses that are not finite, memory or disk space that does not suffice."""

import errno
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from jakiro.errors import NumericalError, ResourceError
from training.config import TrainSettings
from training.data.sampler import Sampler
from training.distributed.processes import Processes

_SHOWN = 8  # rows that an error lists
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class FiniteWatch:
    """Notes which losses are not finite; nobody waits for the device until somebody looks.

    Every process learns of what any of them met, so all stop at the same step.

    Args:
        sampler: of the rows, which an error names.
        settings: of the run.
        processes: this one among the others.
    """

    def __init__(self, sampler: Sampler, settings: TrainSettings, processes: Processes) -> None:
        self._sampler = sampler
        self._size = settings.batch.micro_batch_size
        self._num_batches = settings.batch.global_batch_size // self._size
        # In fp16 gradients may overflow: DeepSpeed then skips the step and lowers the loss scale.
        self._may_overflow = settings.engine.dtype == "fp16"
        self._processes = processes
        self._marks = self._none()
        self._steps: list[tuple[int, Tensor]] = []

    def add(self, first_row: int, loss: Tensor) -> None:
        """Note the loss of the micro-batch that begins at a row of the step."""
        self._marks[first_row // self._size] = ~loss.detach().isfinite()

    def close(self, step: int, gradient_norm: Tensor | float) -> None:
        """Note the gradient of a step, and share what was noted; all processes must call it."""
        if not self._may_overflow:
            # DeepSpeed says -1 where a norm is not finite.
            norm = torch.as_tensor(gradient_norm).detach()
            self._marks[-1] = ~(norm.isfinite() & (norm >= 0))
        self._steps.append((step, self._processes.sum(self._marks)))
        self._marks = self._none()

    def require_finite(self, latest: Callable[[], Path | None], *, is_last: bool) -> None:
        """Raise if a step that is closed was not finite.

        Args:
            latest: tells the checkpoint from which the run can go on.
            is_last: whether the last step counts, too; else nobody waits for it.

        Raises:
            NumericalError: a loss or a gradient was not finite.
        """
        num_waiting = 0 if is_last else 1
        while len(self._steps) > num_waiting:
            step, marks = self._steps.pop(0)
            if found := marks.nonzero().flatten().tolist():
                raise self._error(step, found, latest())

    def _error(self, step: int, found: list[int], checkpoint: Path | None) -> NumericalError:
        batches = [number for number in found if number < self._num_batches]
        last = checkpoint or "none yet"
        return NumericalError(
            f"the {'loss' if batches else 'gradient'} of step {step + 1} is not finite",
            expected="numbers",
            got=f"NaN or infinity from {self._sources(step, batches or range(self._num_batches))}",
            # The same settings would lead there again, unless it was the device's fault.
            remedy="look at these rows of data, or lower optimizer.learning_rate or set "
            "optimizer.max_grad_norm in another run_folder; or start again, and the run repeats the steps "
            f"since its last good checkpoint: {last}",
        )

    def _sources(self, step: int, batches: Iterable[int]) -> str:
        rows: dict[int, str] = {}
        for number in batches:
            begin = number * self._size
            rows |= self._sampler.sources(step, begin, begin + self._size)
        named = [f"packed row {row + 1} ({of})" for row, of in rows.items()]
        return ", ".join(named[:_SHOWN]) + (", ..." if len(named) > _SHOWN else "")

    def _none(self) -> Tensor:
        return torch.zeros(self._num_batches + 1, device=self._processes.device)


@contextmanager
def exhaustion_explained(settings: TrainSettings, *, evaluates: bool = False) -> Iterator[None]:
    """Say what to change when memory or disk space does not suffice.

    Args:
        settings: of the run.
        evaluates: whether an evaluation is inside, not a step of training.

    Raises:
        ResourceError: there was too little inside.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if isinstance(error, OSError) and error.errno in _NO_SPACE:
            raise _cannot_write("what the run records", settings.run_folder, error) from error
        if not is_out_of_memory(error):
            raise
        what = "an evaluation" if evaluates else "a step of training"
        raise ResourceError(
            f"there is too little memory for {what}",
            got=str(error).strip().splitlines()[0] if str(error) else "an allocation that failed",
            remedy=_remedy(settings, evaluates=evaluates),
        ) from error


@contextmanager
def writing(what: str, folder: Path, processes: Processes) -> Iterator[bool]:
    """Yield whether this process writes; what stops it stops all processes.

    Args:
        what: is written.
        folder: to which.
        processes: all of them come here.

    Raises:
        ResourceError: it cannot be written.
    """
    with processes.together():
        try:
            yield processes.is_first
        except (OSError, RuntimeError, SafetensorError) as error:  # it depends on who writes
            raise _cannot_write(what, folder, error) from error


def _cannot_write(what: str, folder: Path, error: Exception) -> ResourceError:
    return ResourceError(
        f"cannot write {what} to {folder}",
        expected="enough disk space, and no limit on the size of files",
        got=error,
        remedy="make room and start again; the run goes on from its last checkpoint",
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be had, on a GPU or in main memory."""
    is_typed = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_typed or "DefaultCPUAllocator: can't allocate memory" in str(error)


def _remedy(settings: TrainSettings, *, evaluates: bool) -> str:
    if evaluates:
        return (
            f"lower evaluation.max_new_tokens ({settings.evaluation.max_new_tokens}), "
            f"evaluation.num_prompts ({settings.evaluation.num_prompts}) or batch.micro_batch_size "
            f"({settings.batch.micro_batch_size}); the run then goes on from its last checkpoint"
        )
    return (
        "; ".join(_savings(settings)) + "; the run then goes on where it was; "
        "or start another one with a shorter data.sequence_length"
    )


def _savings(settings: TrainSettings) -> Iterator[str]:
    """Yield what would save memory and is not done yet, the cheapest first."""
    batch, engine = settings.batch, settings.engine
    if batch.micro_batch_size > 1:
        yield f"lower batch.micro_batch_size ({batch.micro_batch_size})"
    if settings.objective.chunk_size > 1:
        yield f"lower objective.chunk_size ({settings.objective.chunk_size})"
    if not engine.activation_checkpointing:
        yield "set engine.activation_checkpointing=true"
    if settings.optimizer.kind == "muon":  # it needs whole matrices
        return
    if engine.zero_stage < (2 if settings.lora else 3):
        yield f"raise engine.zero_stage ({engine.zero_stage})"
    if not engine.offload_optimizer:
        yield "set engine.offload_optimizer=true"
