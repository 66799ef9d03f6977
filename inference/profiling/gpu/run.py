"""The unattended run of all sections of `jakiro profile gpu`.

After every row, the document is written again, so that a run that is cut off keeps its results. An
error in a section ends only this section.
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Literal, NamedTuple, get_args

import torch

from inference.benchmark.machine import environment
from inference.benchmark.timing import note
from inference.profiling.gpu.arms import described
from inference.profiling.gpu.clocks import gpu_state
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
from inference.profiling.gpu.time_limit import OutOfTime, time_limit
from inference.profiling.gpu.workbench import Workbench, build_workbench
from jakiro.errors import ConfigError
from jakiro.utils.settings import Settings

SectionName = Literal[
    "machine", "autoregressive", "verify", "step", "draft", "recordings", "headline", "batch"
]
Measure = Callable[[Workbench, Mapping[str, SectionResult]], Iterator[Row]]


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
        except Exception as fault:  # noqa: BLE001 - nobody is there to start the next section
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
