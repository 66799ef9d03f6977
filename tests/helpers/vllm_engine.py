"""vLLM in a process of its own, and drafters that are exported for it."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jakiro.drafter import JakiroDrafter
from jakiro.exchange.eagle3_export import write_export
from jakiro.exchange.vllm_export import export_vllm
from jakiro.target.adapter import TargetAdapter

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "tests" / "vllm" / "engine.py"
DRAFTS = 4
MARKS = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("vllm.config") is None, reason="run `make test-vllm`"),
]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def exported(drafter: JakiroDrafter, model: Any, folder: Path) -> Path:
    """Export a drafter for the plug-in, and return the folder."""
    files = export_vllm(drafter, TargetAdapter(model))
    write_export(files.weights, files.config, folder)
    return folder


def eagle3(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return vLLM's config of speculative decoding with the drafter in a folder."""
    options = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": DRAFTS}
    return options | changes


def start_engine(
    folder: Path, record: bool = False, **request: Any
) -> subprocess.CompletedProcess[str]:
    """Let vLLM generate, and return the process when it has ended."""
    (folder / "request.json").write_text(json.dumps(request))
    files = ["request.json", "answer.json", "logits.pt" if record else "-"]
    command = [sys.executable, str(ENGINE), *files]
    return subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )


def answers(folder: Path, **request: Any) -> list[dict[str, Any]]:
    """Let vLLM generate, and return texts and counters of each batch; see `start_engine`."""
    run = start_engine(folder, **request)
    assert run.returncode == 0, run.stderr[-4000:]
    found: list[dict[str, Any]] = json.loads((folder / "answer.json").read_text())
    return found


def recorded(folder: Path) -> list[Tensor]:
    """Return the logits of drafted tokens in the order in which they were computed."""
    calls: list[Tensor] = torch.load(folder / "logits.pt")
    return calls
