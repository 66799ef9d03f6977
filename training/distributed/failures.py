"""Failures of a run: losses that are not finite, lost processes, lack of memory or disk space."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from jakiro.errors import NumericalError, ResourceError
from jakiro.utils.files import is_disk_full
from jakiro.utils.memory import is_out_of_memory
from jakiro.utils.wording import summary_of
from training.config import TrainSettings
from training.data.sampler import Sampler
from training.distributed.processes import Processes

_SHOWN = 8  # largest number of sequences that an error lists


class FiniteWatch:
    """Records which losses and gradients are not finite, without waiting for the device.

    Only `require_finite` waits for the device. The records are shared among all processes, so that
    all processes stop at the same step.
    """

    def __init__(self, sampler: Sampler, settings: TrainSettings, processes: Processes) -> None:
        self._sampler = sampler
        self._size = settings.batch.micro_batch_size
        self._num_batches = settings.batch.global_batch_size // self._size
        # In fp16, gradients may overflow. DeepSpeed then skips the step and lowers the loss scale.
        self._may_overflow = settings.engine.dtype == "fp16"
        self._processes = processes
        self._marks = self._none()
        self._steps: list[tuple[int, Tensor]] = []

    def add(self, first_sequence: int, loss: Tensor) -> None:
        """Record whether the loss of a micro-batch is finite."""
        self._marks[first_sequence // self._size] = ~loss.detach().isfinite()

    def close(self, step: int, gradient_norm: Tensor | float) -> None:
        """Record whether a step's gradient norm is finite, and combine all processes' records.

        All processes must call this method. In fp16, norms may overflow and are not recorded.

        Args:
            gradient_norm: norm of the gradient; -1 if DeepSpeed found that the norm is not finite.
        """
        if not self._may_overflow:
            # DeepSpeed returns -1 for a norm that is not finite.
            norm = torch.as_tensor(gradient_norm).detach()
            self._marks[-1] = ~(norm.isfinite() & (norm >= 0))
        self._steps.append((step, self._processes.sum(self._marks)))
        self._marks = self._none()

    def require_finite(self, latest: Callable[[], Path | None], *, is_last: bool) -> None:
        """Raise an error if the loss or gradient of a recorded step is not finite."""
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
            expected="finite numbers",
            got=f"NaN or infinity from {self._sources(step, batches or range(self._num_batches))}",
            # The same settings would fail again, unless the device was at fault.
            remedy="check these records, or start a run in another run_folder with a lower "
            "optimizer.learning_rate or with optimizer.max_grad_norm set; if the device may be at "
            "fault, start the same run again, which repeats the steps since the last good "
            f"checkpoint: {last}",
        )

    def _sources(self, step: int, batches: Iterable[int]) -> str:
        sources: dict[int, str] = {}
        for number in batches:
            begin = number * self._size
            sources |= self._sampler.sources(step, begin, begin + self._size)
        named = [f"packed sequence {index + 1} ({source})" for index, source in sources.items()]
        return ", ".join(named[:_SHOWN]) + (", ..." if len(named) > _SHOWN else "")

    def _none(self) -> Tensor:
        return torch.zeros(self._num_batches + 1, device=self._processes.device)


@contextmanager
def exhaustion_explained(settings: TrainSettings) -> Iterator[None]:
    """Turn errors about a lack of memory or disk space into errors that name the remedy."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError, SafetensorError) as error:
        if is_disk_full(error):
            raise _cannot_write("records of the run", settings.run_folder, error) from error
        if not is_out_of_memory(error):
            raise
        raise ResourceError(
            "there is too little memory",
            got=summary_of(error),
            remedy="lower batch.micro_batch_size, objective.chunk_size or evaluation.num_prompts, "
            "set engine.activation_checkpointing=true, or raise engine.zero_stage; then start "
            "again, and the run resumes from its last checkpoint",
        ) from error


@contextmanager
def lost_processes_explained(last_step: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Turn errors about a lost connection into an error that says that another process ended."""
    try:
        yield
    except RuntimeError as error:
        is_typed = isinstance(error, torch.distributed.DistError)
        if not (is_typed or re.search(r"Connection (closed|reset) by peer", str(error))):
            raise
        raise ResourceError(
            f"another process of this run ended after step {last_step()}",
            got=summary_of(error),
            remedy="see whether that process printed an error, or whether the system killed it, "
            "for example for lack of memory; the same command resumes the run from its last "
            "checkpoint",
        ) from error


@contextmanager
def writing(what: str, folder: Path, processes: Processes) -> Iterator[bool]:
    """Yield whether this process writes; an error in one process stops all processes."""
    with processes.together(), storing(what, folder):
        yield processes.is_first


@contextmanager
def storing(what: str, folder: Path) -> Iterator[None]:
    """Turn the errors of a failed write into an error that names the folder and the remedy."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # types differ between libraries
        raise _cannot_write(what, folder, error) from error


def _cannot_write(what: str, folder: Path, error: Exception) -> ResourceError:
    return ResourceError(
        f"cannot write {what} to {folder}",
        expected="enough disk space and no limit on file sizes",
        got=error,
        remedy="free disk space and start again; the run resumes from its last checkpoint",
    )
