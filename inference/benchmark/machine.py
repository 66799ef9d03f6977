"""The machine of a measurement: its facts and those of the target, the clock, the peak memory."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from jakiro.target.adapter import TargetAdapter
from jakiro.utils.devices import processor
from jakiro.utils.provenance import provenance
from jakiro.utils.settings import Settings
from jakiro.utils.wording import dtype_name

_PROCESS = Path("/proc/self")
_RESET_PEAK = "5"  # see proc_pid_clear_refs(5)


class TargetFacts(Settings):
    """Properties of the target."""

    name_or_path: str
    fingerprint: str
    parameters: int
    dtype: str
    bytes_per_cached_token: int
    # checksum of the GGUF file that the target was converted from; None if there is no such file
    gguf_sha256: str | None = None

    @property
    def weights(self) -> str:
        """The dtype of the weights, and whether they were dequantized."""
        origin = "" if self.gguf_sha256 is None else " (dequantized from a GGUF file)"
        return f"{self.dtype}{origin}"


class MachineFacts(Settings):
    """The machine and versions of a measurement."""

    time: str  # UTC, ISO 8601
    argv: tuple[str, ...]
    commit: str | None
    is_dirty: bool | None  # whether the checkout had uncommitted changes
    versions: dict[str, str | None]
    platform: str
    processor: str
    num_cpus: int | None
    # over the minute before the measurement; other processes distort the timings
    load_average: float | None


class Environment(MachineFacts):
    """Machine, versions and target of a measurement."""

    device: str
    threads: int
    spin_count: str | None  # environment variable GOMP_SPINCOUNT
    target: TargetFacts


def device_name(device: torch.device) -> str:
    """Return the name of a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def machine_facts() -> MachineFacts:
    """Return the machine and versions of a measurement."""
    origin = provenance()
    git = origin["git"] or {"sha": None, "is_dirty": None}
    return MachineFacts(
        time=origin["time"],
        argv=tuple(origin["argv"]),
        commit=git["sha"],
        is_dirty=git["is_dirty"],
        versions=origin["versions"],
        platform=origin["platform"],
        processor=processor(),
        num_cpus=origin["num_cpus"],
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    )


def environment_of(target: TargetAdapter, name_or_path: str) -> Environment:
    """Return the machine, versions and target of a comparison."""
    return Environment(
        **dict(machine_facts()),
        device=device_name(target.device),
        threads=torch.get_num_threads(),
        spin_count=os.environ.get("GOMP_SPINCOUNT"),
        target=TargetFacts(
            name_or_path=name_or_path,
            fingerprint=target.spec.fingerprint,
            parameters=target.model.num_parameters(),
            dtype=dtype_name(target.dtype),
            bytes_per_cached_token=target.new_cache(1, 1).bytes_per_token,
            gguf_sha256=target.spec.gguf_sha256,
        ),
    )


def now() -> float:
    """Return the seconds of a monotonic clock, after the accelerator has done all queued work."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


@dataclass
class Peak:
    """Peak memory in bytes; None if it cannot be measured."""

    bytes: int | None = None


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measure the peak memory of the device's allocator; on a CPU, of this process (on Linux)."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device)
    else:
        try:
            (_PROCESS / "clear_refs").write_text(_RESET_PEAK)
        except OSError:  # the system is not Linux, or writing is not allowed
            yield peak
            return
        yield peak
        lines = (_PROCESS / "status").read_text().splitlines()
        high = next((line.split()[1] for line in lines if line.startswith("VmHWM:")), None)
        peak.bytes = None if high is None else int(high) * 1024
