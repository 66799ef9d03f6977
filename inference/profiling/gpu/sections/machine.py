"""Machine: versions, attention backends, memory bandwidth, and the cost of a kernel launch."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from inference.benchmark.timing import now, seconds_of
from inference.profiling.gpu.arms import guarded_row
from inference.profiling.gpu.document import Row, SectionResult, Value
from inference.profiling.gpu.workbench import Workbench

LAUNCHES = 1000
COPIES = 10
COPIED_BYTES = 1 << 30  # on a GPU
COPIED_BYTES_ON_CPU = 1 << 22


def measure_machine(bench: Workbench, found: Mapping[str, SectionResult]) -> Iterator[Row]:
    """Yield the rows of the section.

    Args:
        bench: target and prompts.
        found: results of earlier sections; they are not used.
    """
    yield guarded_row("device", {}, lambda: Row(arm="device", values=_device(bench.device)))
    yield guarded_row("attention backends", {}, lambda: _backends(bench))
    yield guarded_row("copy", {}, lambda: Row(arm="copy", values=_copy(bench)))
    yield guarded_row("launch", {}, lambda: Row(arm="launch", values=_launch(bench.device)))


def bandwidth(found: Mapping[str, SectionResult]) -> float | None:
    """Return the measured bandwidth of a copy in bytes per second; None if it is unknown."""
    row = found["machine"].find("copy") if "machine" in found else None
    gigabytes = None if row is None else row.number("gigabytes_per_second")
    return None if gigabytes is None else 1e9 * gigabytes


def _device(device: torch.device) -> dict[str, Value]:
    if device.type != "cuda":
        return {"name": device.type}
    facts = torch.cuda.get_device_properties(device)
    return {
        "name": facts.name,
        "capability": f"{facts.major}.{facts.minor}",
        "bytes": facts.total_memory,
        "multiprocessors": facts.multi_processor_count,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def _backends(bench: Workbench) -> Row:
    """Return torch's order of attention backends, and those that can verify a tree."""
    geometry, device = bench.scale.geometry, bench.device
    keys = bench.scale.capacity(bench.scale.main_context, bench.scale.queries[-2])
    width = geometry.hidden_size // geometry.num_heads
    queries = torch.zeros(
        1, geometry.num_heads, bench.scale.queries[-2], width, device=device, dtype=_dtype(bench)
    )
    states = torch.zeros(1, geometry.num_heads, keys, width, device=device, dtype=_dtype(bench))
    mask = torch.zeros(1, 1, queries.shape[2], keys, device=device, dtype=_dtype(bench))
    chosen = torch._fused_sdp_choice(queries, states, states, attn_mask=mask)
    values: dict[str, Value] = {
        "queries": tuple(queries.shape),
        "keys": keys,
        "order": tuple(_names().get(number, str(number)) for number in _order()),
        "chosen": _names().get(int(chosen), str(chosen)),
    }
    if device.type != "cuda":
        reason = "which backends are eligible is known only on a GPU"
        return Row(arm="attention backends", values=values, reason=reason)
    params = torch.backends.cuda.SDPAParams(queries, states, states, mask, 0.0, False, False)
    values |= {
        "flash": torch.backends.cuda.can_use_flash_attention(params),
        "efficient": torch.backends.cuda.can_use_efficient_attention(params),
        "cudnn": torch.backends.cuda.can_use_cudnn_attention(params),
    }
    return Row(arm="attention backends", values=values)


def _dtype(bench: Workbench) -> torch.dtype:
    return bench.target.dtype


def _names() -> dict[int, str]:
    backends: Mapping[str, Any] = SDPBackend.__members__
    return {int(backend.value): name for name, backend in backends.items()}


def _order() -> list[int]:
    """Return the numbers of the backends in the order of preference; empty if unknown."""
    order = getattr(torch._C, "_get_sdp_priority_order", list)
    return [int(number) for number in order()]


def _copy(bench: Workbench) -> dict[str, Value]:
    """Return the bandwidth of copies within the device; a byte counts twice: read and written."""
    size = COPIED_BYTES if bench.device.type == "cuda" else COPIED_BYTES_ON_CPU
    source = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    copy = torch.empty_like(source)

    def work() -> None:
        for _ in range(COPIES):
            copy.copy_(source)

    work()
    fastest = min(seconds_of(work) for _ in range(bench.scale.repeats))
    return {"gigabytes_per_second": 2 * size * COPIES / fastest / 1e9, "bytes": size}


def _launch(device: torch.device) -> dict[str, Value]:
    """Return the host's time for a tiny kernel, without and with waiting for the device."""
    number = torch.zeros(1, device=device)
    for _ in range(LAUNCHES):
        number.zero_()
    started = now()
    for _ in range(LAUNCHES):
        number.zero_()
    queued = time.perf_counter() - started
    waited = sum(seconds_of(number.zero_) for _ in range(LAUNCHES))
    return {
        "launch_microseconds": 1e6 * queued / LAUNCHES,
        "wait_microseconds": 1e6 * waited / LAUNCHES,
    }
