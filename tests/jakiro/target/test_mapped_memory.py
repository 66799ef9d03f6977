"""Memory that shows a file is given back and read again; changed memory stays."""

import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from jakiro.target.mapped_memory import MappedMemory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is mapped")
SIZE = 8 << 20


def _resident() -> int:
    """Return the bytes of files in this process' memory."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"RssFile:\s+(\d+) kB", status)
    assert found is not None
    return 1024 * int(found[1])


@pytest.mark.parametrize("changes", [False, True])
def test_only_unchanged_memory_is_given_back(changes: bool, tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    save_file({"weight": torch.arange(SIZE // 4, dtype=torch.float32)}, file)
    weight = load_file(file)["weight"]
    expected = weight.clone()
    if changes:
        weight[7] = expected[7] = -1.0
    before = _resident()
    MappedMemory().give_back(weight)
    gave_back = before - _resident() > SIZE // 2
    assert gave_back is not changes
    assert torch.equal(weight, expected)
