"""The unattended run of all sections of `jakiro profile gpu`.

After every row, the document is written again, so that a run that is cut off keeps its results. An
error in a section ends only this section.
"""

import gc
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Literal, NamedTuple, get_args

import torch

from inference.benchmark.machine import environment
from inference.benchmark.timing import note
from inference.profiling.gpu.arms import described
from inference.profiling.gpu.criteria import criteria_of, headline_of
from inference.profiling.gpu.document import GPUDocument, Row, SectionResult
from inference.profiling.gpu.scale import FULL, QUICK, Scale
from inference.profiling.gpu.sections.autoregressive import measure_autoregressive_arms
from inference.profiling.gpu.sections.batch import measure_batch_sizes
from inference.profiling.gpu.sections.draft import measure_drafting
from inference.profiling.gpu.sections.headline import measure_headline
from inference.profiling.gpu.sections.machine import measure_machine
from inference.profiling.gpu.sections.recordings import measure_recordings
from inference.profiling.gpu.sections.step import measure_step
from inference.profiling.gpu.sections.verify import measure_verification
from inference.profiling.gpu.workbench import Workbench, build_workbench
from jakiro.errors import ConfigError
from jakiro.utils.settings import Settings

SectionName = Literal[
    "machine", "autoregressive", "verify", "step", "draft", "recordings", "headline", "batch"
]
Measure = Callable[[Workbench, Mapping[str, SectionResult]], Iterator[Row]]
_QUERY = {
    "clocks.sm": "sm_mhz",
    "clocks.mem": "memory_mhz",
    "power.draw": "watts",
    "temperature.gpu": "celsius",
    "utilization.gpu": "busy_percent",
    "memory.used": "used_mib",
}
_QUERY_SECONDS = 10  # a program that takes longer is stopped


class Section(NamedTuple):
    """A section and its time limit."""

    minutes: float
    measure: Measure


SECTIONS: dict[SectionName, Section] = {
    "machine": Section(1.0, measure_machine),
    "autoregressive": Section(5.0, measure_autoregressive_arms),
    "verify": Section(6.0, measure_verification),
    "step": Section(4.0, measure_step),
    "draft": Section(3.0, measure_drafting),
    "recordings": Section(4.0, measure_recordings),
    "headline": Section(2.0, measure_headline),
    "batch": Section(3.0, measure_batch_sizes),
}


class GPUProfileSettings(Settings):
    """Device and extent of the measurements.

    Attributes:
        device: device to measure on.
        only: names of the sections to run; None for all sections.
        quick: whether to measure a tiny target for only a few seconds, to test that all sections
            work; required on a CPU.
    """

    device: str = "cuda"
    only: tuple[SectionName, ...] | None = None
    quick: bool = False


def measure_gpu(settings: GPUProfileSettings, write: Callable[[str], None]) -> GPUDocument:
    """Run the sections, and return the document.

    Args:
        settings: device and extent of the measurements.
        write: function that replaces the stored document, a JSON text.

    Raises:
        ConfigError: the device cannot be used.
    """
    device = _device(settings)
    run = _Run(settings, QUICK if settings.quick else FULL, device, write)
    names = [name for name in get_args(SectionName) if name in (settings.only or SECTIONS)]
    for name in names:
        run.measure(name)
    document = run.store(is_complete=True)
    for criterion in document.criteria:
        value = "" if criterion.value is None else f" {criterion.value:.3g}"
        bound = f"{criterion.direction} {criterion.bound:g}"
        note(f"{criterion.state}: {criterion.name}: {criterion.measure}{value} ({bound})")
    return document


def _device(settings: GPUProfileSettings) -> torch.device:
    """Return the device, which becomes the current one.

    Raises:
        ConfigError: the device cannot be used.
    """
    kind = settings.device.partition(":")[0]
    if kind == "cuda" and torch.cuda.is_available():
        device = torch.device(settings.device)
        if device.index is not None:
            torch.cuda.set_device(device)
        return device
    if kind == "cpu" and settings.quick:
        return torch.device("cpu")
    raise ConfigError(
        f"cannot measure on the device {settings.device!r}",
        expected="a CUDA device",
        got="a CPU" if kind == "cpu" else "no such device",
        remedy="run on a machine with a GPU, or test the program with --quick --device cpu",
    )


class _Run:
    """Results so far."""

    def __init__(
        self,
        settings: GPUProfileSettings,
        scale: Scale,
        device: torch.device,
        write: Callable[[str], None],
    ) -> None:
        self.scale = scale
        self.is_quick = settings.quick
        self.write = write
        self.bench = build_workbench(scale, device)
        self.environment = environment(self.bench.target, settings)
        self.sections: dict[str, SectionResult] = {}

    def measure(self, name: SectionName) -> None:
        """Run a section until it ends, fails or reaches its time limit."""
        section = SECTIONS[name]
        note(f"{name} (at most {section.minutes:g} minutes)")
        started = time.perf_counter()
        before = gpu_state(self.bench.device)
        found = dict(self.sections)
        result = SectionResult(minutes=section.minutes, before=before)
        error = None
        try:
            with time_limit(60 * section.minutes):
                for row in section.measure(self.bench, found):
                    note(_line(row))
                    result = result.model_copy(update={"rows": (*result.rows, row)})
                    self.sections[name] = result
                    self.store(is_complete=False)
        except OutOfTime:
            error = f"the section was stopped at its time limit of {section.minutes:g} minutes"
        except Exception as fault:  # noqa: BLE001 - the next sections are measured all the same
            error = described(fault)
        seconds = time.perf_counter() - started
        after = gpu_state(self.bench.device)
        update = {"seconds": seconds, "after": after, "error": error}
        self.sections[name] = result.model_copy(update=update)
        if error is not None:
            note(f"{name}: {error}")
        self._free()
        self.store(is_complete=False)

    def store(self, *, is_complete: bool) -> GPUDocument:
        """Write the document so far, and return it.

        Args:
            is_complete: whether all sections have ended.
        """
        rows = [row for section in self.sections.values() for row in section.rows]
        document = GPUDocument(
            environment=self.environment,
            is_complete=is_complete,
            is_valid=all(row.state != "invalid" for row in rows),
            sections=self.sections,
            headline=headline_of(self.sections),
            criteria=criteria_of(self.sections, self.scale, is_quick=self.is_quick),
        )
        self.write(document.model_dump_json(indent=1) + "\n")
        return document

    def _free(self) -> None:
        """Free the memory of the last section."""
        gc.collect()
        if self.bench.device.type == "cuda":
            with suppress(RuntimeError):  # the section may have left the GPU in a bad state
                torch.cuda.empty_cache()


def _line(row: Row) -> str:
    """Return a row as a line of progress."""
    conditions = ", ".join(f"{name} {value}" for name, value in row.conditions.items())
    values = row.values or {}
    numbers = [f"{key} {v:.4g}" for key, v in values.items() if isinstance(v, int | float)]
    name = f"{row.arm} ({conditions})" if conditions else row.arm
    is_measured = row.state == "measured"
    return f"  {name}: {', '.join(numbers) if is_measured else f'{row.state}, {row.reason}'}"


def gpu_state(device: torch.device) -> dict[str, float | str] | None:
    """Return the current state of a GPU; None if it is unknown, as on a CPU."""
    if device.type != "cuda":
        return None
    # The numbering of the program may differ from that of this process, but the identifier is
    # the same.
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        identifier = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        if identifier is not None:
            command.append(f"--id=GPU-{identifier}")
        finished = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=_QUERY_SECONDS
        )
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return None
    return state_of(finished.stdout)


def state_of(output: str) -> dict[str, float | str] | None:
    """Return the values in the first line of the program's output; None without any."""
    lines = output.strip().splitlines()
    if not lines:
        return None
    texts = [text.strip() for text in lines[0].split(",")]
    return {name: _number(text) for name, text in zip(_QUERY.values(), texts, strict=False)}


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:  # such as "[N/A]"
        return text


class OutOfTime(BaseException):
    """Work has reached its time limit; not an `Exception`, which the work might handle itself."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` in the work of a `with` block that takes longer than `seconds`.

    A call into a library is interrupted when it returns. Outside the main thread, and on systems
    without interval timers, there is no limit.

    Raises:
        OutOfTime: the time is up.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise OutOfTime

    handler = signal.signal(signal.SIGALRM, stop)
    # The timer of the caller, such as that of a test, continues afterwards.
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    started = time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            rest = max(left - (time.monotonic() - started), 0.001)
            signal.setitimer(signal.ITIMER_REAL, rest, interval)
