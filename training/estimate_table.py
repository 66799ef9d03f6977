"""The table that `jakiro train --dry-run` prints."""

from rich import box
from rich.table import Table

from training.estimate import Estimate, duration_text, size_text


def render(found: Estimate, memory: int, flops_per_second: float | None) -> Table:
    """Return the table that `jakiro train --dry-run` prints.

    Args:
        found: what is estimated.
        memory: bytes of a device.
        flops_per_second: of large matrix products on a device, if it is known.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_footer=True)
    total = f"{size_text(found.device_bytes)} of {size_text(memory)}"
    table.add_column("on each device", "memory at the peak, at most")
    table.add_column("", total, justify="right")
    for name, value in _rows(found, flops_per_second).items():
        table.add_row(name, value)
    return table


def _parameters(found: Estimate) -> str:
    trained = f"{found.parameters:,} parameters"
    return f"{trained} beside {found.frozen:,} frozen ones" if found.frozen else trained


def _rows(found: Estimate, flops_per_second: float | None) -> dict[str, str]:
    states, batch = found.states, found.settings.batch
    micro = f"{batch.micro_batch} of {batch.rows} rows, {found.num_processes} process(es)"
    return {
        "target": size_text(found.target),
        f"drafter, {_parameters(found)}": size_text(states.parameters),
        "gradients": size_text(states.gradients),
        "optimizer states": size_text(states.optimizer),
        "buffers of DeepSpeed": size_text(states.buffers),
        "of these in main memory": size_text(states.host),
        "features and cache of the target": size_text(found.micro_batch.features),
        "activations": size_text(found.micro_batch.activations),
        "a micro-batch": micro,
        "main memory of a process while loading": size_text(found.host_bytes),
        **_shards(found),
        "disk, all together": size_text(found.disk_bytes),
        "tokens read": f"{found.tokens:,}",
        "an optimizer step": f"{found.flops / 1e12:,.2f} TFLOP",
        **_time(found, flops_per_second),
    }


def _shards(found: Estimate) -> dict[str, str]:
    size, is_exact = found.shards
    name = "features on disk" if is_exact else "features on disk for these steps, at most"
    return {name: size_text(size)} if size else {}


def _time(found: Estimate, flops_per_second: float | None) -> dict[str, str]:
    if flops_per_second is None:
        return {"time": "with --device-speed"}
    minutes = found.settings.steps * found.flops / flops_per_second / 60
    return {f"time at {flops_per_second / 1e12:,.2f} TFLOP/s, at least": duration_text(minutes)}
