"""Clocks, power and temperature of a GPU, as `nvidia-smi` reports them."""

import subprocess

import torch

QUERY = {
    "clocks.sm": "sm_mhz",
    "clocks.mem": "memory_mhz",
    "power.draw": "watts",
    "temperature.gpu": "celsius",
    "utilization.gpu": "busy_percent",
    "memory.used": "used_mib",
}
SECONDS = 10  # a program that takes longer is stopped


def gpu_state(device: torch.device) -> dict[str, float | str] | None:
    """Return the present state of a GPU; None if it is unknown, as on a CPU."""
    if device.type != "cuda":
        return None
    # The numbering of the program may differ from that of this process, but the identifier is
    # the same.
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        identifier = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        if identifier is not None:
            command.append(f"--id=GPU-{identifier}")
        finished = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=SECONDS
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
    return {name: _number(text) for name, text in zip(QUERY.values(), texts, strict=False)}


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:  # such as "[N/A]"
        return text
